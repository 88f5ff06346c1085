"""Flags that cannot be used, and what is shown of those that can."""

import pytest

from kvrelay.settings import StageSettings
from kvrelay.stage.program import EXIT_NOT_STARTED, parse_settings, without_password
from services.prefill.config import PrefillSettings


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--pool-tokens=many"], "pool_tokens: Input should be a valid integer"),
        (["--pool-tokens=0"], "pool_tokens: Input should be greater than or equal to 1, got '0'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings("services.x", StageSettings, flags)
    assert ended.value.code == EXIT_NOT_STARTED
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("services.x: ") and says in last


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_POOL_TOKENS", "512")
    monkeypatch.setenv("KVRELAY_MODEL", "tiny")
    got = parse_settings("services.prefill", PrefillSettings, ["--pool-tokens=1024", "--no-prefix-cache"])
    assert (got.pool_tokens, got.model, got.prefix_cache) == (1024, "tiny", False)


def test_passwords_are_not_shown() -> None:
    assert without_password("redis://user:secret@host:1/0") == "redis://user:***@host:1/0"
    assert without_password("redis://host:1/0") == "redis://host:1/0"
