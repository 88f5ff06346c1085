"""Keeps the prefix index told of what a stage's cache holds. Knows no Redis command."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrelay.stage.core import StageCore
from kvrelay.types import CacheChange, StageDescription

log = logging.getLogger(__name__)


@asynccontextmanager
async def announced(core: StageCore, description: StageDescription) -> AsyncIterator[Callable[[], bool]]:
    """Announces until the body ends; gives a function that tells whether the index hears. Without redis_url: nothing.

    Redis may be away, at the start too: the announcer tells everything anew when it is back.
    """
    if not core.settings.redis_url:
        yield lambda: False
        return
    from kvrelay.index.announcer import IndexAnnouncer

    changes = core.driver.cache_changes()
    announcer = IndexAnnouncer(
        core.settings.redis_url,
        description,
        hashes=core.driver.cached_hashes,
        heartbeat_s=core.settings.heartbeat_s,
    )
    async with announcer:
        feeding = asyncio.create_task(_feed(announcer.announce, changes))
        try:
            yield lambda: announcer.connected
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


async def _feed(announce: Callable[[list[CacheChange]], None], changes: AsyncIterator[list[CacheChange]]) -> None:
    async for batch in changes:
        announce(batch)
