"""The router's side of the shared index: one script call a look-up, and never an error. Writes nothing."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import redis.exceptions

from kvrelay.index import store
from kvrelay.index.base import Lookup
from kvrelay.index.breaker import Breaker
from kvrelay.types import StageDescription

log = logging.getLogger(__name__)


class RedisIndex:
    """Look-ups and instances, from Redis. An async context manager: entering tries to connect, but needs no Redis.

    `observe(outcome, seconds)` hears of each look-up: ok, timeout, error, open (the breaker refused it) or busy (too
    many at once: it was sent too late, or never, and so says nothing of Redis).
    """

    LOOKUP = (
        store.LUA
        + """
    -- KEYS[1]: the set of incarnations. ARGV[1]: key prefix. ARGV[2]: the prompt's block hashes, 16 bytes each.
    -- Keys of instances and blocks are made here, from the prefix: this needs one Redis, not a cluster.
    -- Result: id, depth, id, depth, ... of the living instances that hold at least the first block.
    local prefix, hashes = ARGV[1], ARGV[2]
    local blocks, buckets = {}, {}
    local function holds(held, i)
      if not blocks[i] then
        blocks[i] = string.sub(hashes, i * 16 - 15, i * 16)
        buckets[i] = bucket(blocks[i])
      end
      return redis.call('HEXISTS', held .. buckets[i], blocks[i]) == 1
    end
    local count, result = #hashes / 16, {}
    for _, incarnation in ipairs(redis.call('SMEMBERS', KEYS[1])) do
      local id, epoch = string.match(incarnation, '^(.*):(%d+)$')
      local held = prefix .. 'held:' .. incarnation .. ':'
      -- Most instances hold nothing of a prompt, and one often holds all of it: ask that first.
      if holds(held, 1) and redis.call('HGET', prefix .. 'instance:' .. id, 'scoring') == epoch then
        local low, high = 1, count
        if holds(held, count) then low = count end
        while low < high do
          local middle = math.ceil((low + high) / 2)
          if holds(held, middle) then low = middle else high = middle - 1 end
        end
        result[#result + 1] = id
        result[#result + 1] = low
      end
    end
    return result
    """
    )

    INSTANCES = """
    -- KEYS[1]: the set of incarnations. ARGV[1]: key prefix.
    -- Result: the JSON descriptions of the living instances.
    local result = {}
    for _, incarnation in ipairs(redis.call('SMEMBERS', KEYS[1])) do
      local id, epoch = string.match(incarnation, '^(.*):(%d+)$')
      local found = redis.call('HMGET', ARGV[1] .. 'instance:' .. id, 'epoch', 'description')
      if found[1] == epoch then result[#result + 1] = found[2] end
    end
    return result
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.020,
        failures: int = 5,
        pause_s: float = 1.0,
        at_once: int = 8,
        instances_timeout_s: float = 1.0,
        observe: Callable[[str, float], None] = lambda outcome, seconds: None,
    ) -> None:
        """ValueError: not a Redis URL. `at_once` bounds the connections; more look-ups wait, within the time-out."""
        self._redis = store.connect(url, timeout_s=max(timeout_s, instances_timeout_s))
        self._lookup: Any = self._redis.register_script(self.LOOKUP)
        self._list: Any = self._redis.register_script(self.INSTANCES)
        self._timeout_s = timeout_s
        self._instances_timeout_s = instances_timeout_s
        self._observe = observe
        self._places = asyncio.Semaphore(at_once)
        self._breaker: Breaker | None = None
        self._breaker_settings = (failures, pause_s)
        self._known: list[StageDescription] = []
        self._unreadable: set[str] = set()
        self._answers = True

    async def __aenter__(self) -> Self:
        await self.instances()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._redis.aclose()

    @property
    def connected(self) -> bool:
        """What came last: an answer, or a listing that failed or a breaker that opened. Follows Redis without look-ups
        too, as long as somebody asks for `instances` now and then.
        """
        return self._answers

    async def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        """Part of PrefixIndex. One round trip; degraded, within the time-out, if Redis does not answer."""
        if not hashes:
            return Lookup()
        clock = asyncio.get_running_loop().time
        breaker = self._breaker = self._breaker or Breaker(*self._breaker_settings, clock)
        began = clock()
        if not breaker.admit():
            self._observe("open", 0.0)
            return Lookup(degraded=True)
        sent_at: float | None = None
        try:
            # A call that is cancelled half-way, by this time-out too, drops its connection (redis-py does so):
            # the next one would read its reply.
            async with asyncio.timeout(self._timeout_s), self._places:
                sent_at = clock()
                reply = await self._lookup(keys=[store.INSTANCES], args=[store.PREFIX, b"".join(hashes)])
        except Exception as exc:
            timed_out = isinstance(exc, TimeoutError | redis.exceptions.TimeoutError)
            if timed_out and (sent_at is None or clock() - sent_at < self._timeout_s / 2):
                breaker.abandoned()
                self._observe("busy", clock() - began)
            else:
                self._fail(breaker, exc)
                self._observe("timeout" if timed_out else "error", clock() - began)
            return Lookup(degraded=True)
        except BaseException:
            breaker.abandoned()
            raise
        if not breaker.closed:
            log.info("prefix index answers again")
        breaker.succeeded()
        self._answers = True
        self._observe("ok", clock() - began)
        return Lookup({reply[i].decode(): int(reply[i + 1]) for i in range(0, len(reply), 2)})

    def _fail(self, breaker: Breaker, exc: Exception) -> None:
        was_closed = breaker.closed
        breaker.failed()
        if was_closed and not breaker.closed:
            self._answers = False
            log.warning("prefix index does not answer, going on without: %r", exc)

    async def instances(self) -> list[StageDescription]:
        """The stages that have announced themselves and live; those last known if Redis does not answer."""
        try:
            async with asyncio.timeout(self._instances_timeout_s):
                texts = await self._list(keys=[store.INSTANCES], args=[store.PREFIX])
        except Exception as exc:
            log.debug("prefix index does not list its instances: %r", exc)
            self._answers = False
            return list(self._known)
        self._answers = True
        self._known = [description for text in texts if (description := self._read(text)) is not None]
        return list(self._known)

    def _read(self, text: bytes) -> StageDescription | None:
        try:
            return store.description_from_json(text)
        except ValueError as exc:
            if str(exc) not in self._unreadable:
                self._unreadable.add(str(exc))
                log.warning("prefix index: %s", exc)
            return None
