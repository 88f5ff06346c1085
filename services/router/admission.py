"""How many requests may be served and may wait. Knows nothing of them."""

import asyncio
from collections.abc import Callable

from kvrelay.errors import Overloaded


class Admission:
    """Places for `max_in_flight`, and a first-come queue of `max_queued` before them. `async with` holds a place."""

    def __init__(self, max_in_flight: int, max_queued: int, retry_after_s: float, refused: Callable[[], None]) -> None:
        self._places = asyncio.Semaphore(max_in_flight)
        self._max_queued = max_queued
        self._retry_after_s = retry_after_s
        self._refused = refused
        self.in_flight = 0
        self.queued = 0

    async def __aenter__(self) -> None:
        """Raises Overloaded at once if the queue is full."""
        if self._places.locked():
            if self.queued >= self._max_queued:
                self._refused()
                raise Overloaded(
                    f"the router serves {self.in_flight} requests and {self.queued} wait (max_queued)",
                    self._retry_after_s,
                )
            self.queued += 1
            try:
                await self._places.acquire()
            finally:
                self.queued -= 1
        else:
            await self._places.acquire()
        self.in_flight += 1

    async def __aexit__(self, *_: object) -> None:
        self.in_flight -= 1
        self._places.release()
