"""When not to try, and when to try again."""

from kvrelay.index.breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3, 1.0, Clock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.admit()
    for _ in range(3):
        breaker.failed()
    assert not breaker.closed
    assert not breaker.admit()


def test_after_the_pause_one_call_tries_and_its_outcome_decides() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, clock)
    breaker.failed()
    clock.now = 1.0
    assert breaker.admit()
    assert not breaker.admit()
    breaker.failed()
    assert not breaker.admit()
    clock.now = 2.0
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.closed
    assert breaker.admit()


def test_a_probe_without_an_outcome_leaves_the_place_to_the_next() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, clock)
    breaker.failed()
    clock.now = 1.0
    assert breaker.admit()
    breaker.abandoned()
    assert breaker.admit()
