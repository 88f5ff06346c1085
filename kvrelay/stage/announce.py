"""Keeps the prefix index told of what a stage's cache holds. Knows no Redis command."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.index.announcer import IndexAnnouncer
from kvrelay.stage.core import StageCore
from kvrelay.types import CacheChange, StageDescription


@asynccontextmanager
async def announced(core: StageCore, description: StageDescription) -> AsyncIterator[IndexAnnouncer]:
    """Announces until the body ends. Redis may be away, at the start too, or not be there at all (no redis_url)."""
    changes = core.driver.cache_changes()
    announcer = IndexAnnouncer(
        core.settings.redis_url, description, hashes=core.driver.cached_hashes, heartbeat_s=core.settings.heartbeat_s
    )
    async with announcer:
        feeding = asyncio.create_task(_feed(announcer, changes))
        try:
            yield announcer
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


async def _feed(announcer: IndexAnnouncer, changes: AsyncIterator[list[CacheChange]]) -> None:
    async for batch in changes:
        announcer.announce(batch)
