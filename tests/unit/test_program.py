"""How every program refuses to start: one line that names the setting, exit code 2, at once."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrelay.program import EXIT_NOT_STARTED, parse_settings, without_password
from kvrelay.settings import ServiceSettings, StageSettings
from kvrelay.wan.settings import WanSettings
from services.prefill.config import PrefillSettings
from services.router.config import RouterSettings

STAGE = ("services.prefill", "services.relay_decode", "services.main_decode")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--pool-tokens=many"], "pool_tokens: Input should be a valid integer"),
        (["--pool-tokens=0"], "pool_tokens: Input should be greater than or equal to 1, got '0'"),
        (["--site=c"], "site: Input should be 'a' or 'b', got 'c'"),
        (["--dtype=int3"], "dtype: Input should be"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings("services.x", StageSettings, flags)
    assert ended.value.code == EXIT_NOT_STARTED
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("services.x: cannot start: ") and says in line


def test_a_variable_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_DELAY_MS", "soon")
    with pytest.raises(SystemExit):
        parse_settings("kvrelay.wan", WanSettings, [])
    assert "delay_ms: Input should be a valid number" in capsys.readouterr().err


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_POOL_TOKENS", "512")
    monkeypatch.setenv("KVRELAY_MODEL", "tiny")
    got = parse_settings("services.prefill", PrefillSettings, ["--pool-tokens=1024", "--no-prefix-cache"])
    assert (got.pool_tokens, got.model, got.prefix_cache) == (1024, "tiny", False)


@pytest.mark.parametrize("settings", [PrefillSettings, RouterSettings, WanSettings])
def test_help_says_what_every_setting_means(settings: type[ServiceSettings]) -> None:
    undescribed = [name for name, field in settings.model_fields.items() if not field.description]
    assert undescribed == []


def refused(module: str, *flags: str) -> str:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", module, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_NOT_STARTED, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"{module}: cannot start: ")
    # torch alone takes longer on a busy machine; the limit only catches a model that is loaded first.
    assert time.monotonic() - began < 30
    return line


@pytest.mark.parametrize(
    ("module", "flags", "says"),
    [
        ("services.prefill", ["--model=/no/such"], "/no/such: no such file or directory"),
        ("services.relay_decode", ["--pace=speed=1"], "pace: 'speed=1'"),
        ("services.main_decode", ["--advertise=here"], "advertise: must be host:port"),
        ("services.main_decode", ["--redis-url=here"], "redis_url: must begin with"),
        ("services.main_decode", ["--device=tpu"], "device: must be"),
        ("services.main_decode", ["--log-level=loud"], "log_level: must be one of"),
        ("services.router", ["--stages=here"], "stages: must be host:port"),
        ("services.router", ["--drain-s=-1"], "drain_s: Input should be greater"),
        ("services.router", ["--model=/no/such"], "/no/such: no such file or directory"),
        ("kvrelay.wan", ["--rate=nonsense"], "rate: Value error, 'nonsense' is not a rate"),
        ("kvrelay.wan", ["--listen=nowhere"], "listen: must be host:port"),
    ],
)
def test_a_program_that_cannot_start_says_why_in_one_line(module: str, flags: list[str], says: str) -> None:
    assert says in refused(module, *flags)


@pytest.mark.parametrize("module", ["services.prefill", "services.router"])
def test_a_corrupt_model_file_is_named(module: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(12))
    assert f"{path}: corrupt or truncated GGUF header" in refused(module, f"--model={path}", "--listen=127.0.0.1:0")


@pytest.mark.parametrize("module", STAGE)
def test_a_stage_reads_its_flags_before_it_loads_torch(module: str) -> None:
    code = f"import {module}.__main__, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("module", ["services.main_decode", "services.router", "kvrelay.wan"])
def test_a_port_in_use_is_named(module: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--log-level=error", *([] if module == "kvrelay.wan" else ["--model=tiny"])]
        assert f"cannot listen on {address}: Address already in use" in refused(module, f"--listen={address}", *flags)


def test_passwords_are_not_shown() -> None:
    assert without_password("redis://user:secret@host:1/0") == "redis://user:***@host:1/0"
    assert without_password("redis://host:1/0") == "redis://host:1/0"
