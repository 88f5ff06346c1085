"""Recent speeds: what a prompt costs is told apart from how fast its tokens are."""

import pytest

from kvrelay.engine.meter import Meter

FIXED_S, TOKEN_S = 0.04, 0.0001


def ran(meter: Meter, *sizes: int) -> None:
    for size in sizes:
        meter.ran(FIXED_S + TOKEN_S * size, size, only_decodes=False, overran=False)


def estimate_ms(meter: Meter, tokens: int) -> float:
    return meter.prefill_step_ms + 1000 * tokens / meter.prefill_tokens_per_s


@pytest.mark.parametrize("sizes", [(256,) * 3 + (20,) * 50, (20, 256) * 20, (20,) * 20 + (256,) * 3 + (20,) * 20])
def test_small_prompts_do_not_make_large_ones_seem_slow(sizes: tuple[int, ...]) -> None:
    meter = Meter()
    ran(meter, *sizes)
    large = 4 * (1000 * FIXED_S + 256 * 1000 * TOKEN_S)
    assert large <= estimate_ms(meter, 4 * 256) <= large + 1000 * FIXED_S
    assert estimate_ms(meter, 20) == pytest.approx(1000 * (FIXED_S + 20 * TOKEN_S), rel=0.02)


def test_only_small_prompts_seen_is_a_rate_all_the_same() -> None:
    meter = Meter()
    ran(meter, 20, 24, 18)
    assert meter.prefill_tokens_per_s == pytest.approx(480, rel=0.1) and meter.prefill_step_ms == 0


def test_decode_steps_do_not_count() -> None:
    meter = Meter()
    meter.ran(0.03, 8, only_decodes=True, overran=True)
    assert (meter.step_ms, meter.prefill_tokens_per_s, meter.steps, meter.steps_overrun) == (30.0, 0.0, 1, 1)
