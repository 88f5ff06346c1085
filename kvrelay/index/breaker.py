"""When not even to try. Knows no network."""

from collections.abc import Callable


class Breaker:
    """Opens after `failures` in a row; `pause_s` later one call may try, and its outcome closes or opens it again."""

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._pause_s = pause_s
        self._clock = clock
        self._failed = 0
        self._retry_at = 0.0
        self._probing = False

    @property
    def closed(self) -> bool:
        """Calls pass."""
        return self._failed < self._limit

    def admit(self) -> bool:
        """May a call be made now? Whoever gets True must report `succeeded`, `failed` or `abandoned`."""
        if self.closed:
            return True
        if self._probing or self._clock() < self._retry_at:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The call got its answer."""
        self._failed = 0
        self._probing = False

    def failed(self) -> None:
        """The call got none."""
        self._failed += 1
        self._probing = False
        if not self.closed:
            self._retry_at = self._clock() + self._pause_s

    def abandoned(self) -> None:
        """The caller left before the call had an outcome."""
        self._probing = False
