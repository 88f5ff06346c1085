"""One instance's writes to the index, each guarded by epoch and sequence. Knows no task, no time, no queue."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from kvrelay.index import store
from kvrelay.types import CacheChange, StageDescription


class OutOfStep(Exception):
    """Redis does not hold what this writer wrote last (flushed, restarted, expired): announce anew."""


class Superseded(Exception):
    """Another process lives under this instance id."""


class InstanceWriter:
    """All writes of one process. Every script checks that Redis still is as this writer left it; so a flush, a restart
    from an old snapshot, a lost reply or an expiry is noticed by the very next write, and never built upon.
    """

    BEGIN = """
    -- Claims the instance id. Until it has announced its cache in full it does not score.
    -- KEYS[1]: instance key, KEYS[2]: set of incarnations.
    -- ARGV: incarnation, epoch, ttl_ms, description, '1' to take the id from another epoch that lives.
    -- Result: 1; -1 if another epoch lives.
    local epoch = redis.call('HGET', KEYS[1], 'epoch')
    if epoch and epoch ~= ARGV[2] and ARGV[5] ~= '1' then return -1 end
    redis.call('DEL', KEYS[1])
    redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'sequence', 0, 'description', ARGV[4])
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 1
    """

    APPLY = (
        store.LUA
        + """
    -- Applies changes in order, and renews the instance key.
    -- KEYS[1]: instance key.
    -- ARGV: key prefix, incarnation, epoch, sequence, ttl_ms, '1' if the cache is announced in full with this,
    --       changes ('+' or '-', then the hash; 17 bytes each).
    -- Result: 1; 0 if the key is gone or of another sequence; -1 if another epoch lives.
    local now = redis.call('HMGET', KEYS[1], 'epoch', 'sequence')
    if now[1] and now[1] ~= ARGV[3] then return -1 end
    if not now[1] or now[2] ~= ARGV[4] then return 0 end
    local held, changes = ARGV[1] .. 'held:' .. ARGV[2] .. ':', ARGV[7]
    for i = 1, #changes, 17 do
      local hash = string.sub(changes, i + 1, i + 16)
      if string.sub(changes, i, i) == '+' then
        redis.call('HSET', held .. bucket(hash), hash, '')
      else
        redis.call('HDEL', held .. bucket(hash), hash)
      end
    end
    redis.call('HINCRBY', KEYS[1], 'sequence', 1)
    if ARGV[6] == '1' then redis.call('HSET', KEYS[1], 'scoring', ARGV[3]) end
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
    return 1
    """
    )

    CLEAR = """
    -- Forgets what an incarnation has announced, and itself unless it lives.
    -- KEYS[1]: instance key, KEYS[2]: set of incarnations.
    -- ARGV: key prefix, incarnation, its epoch, '1' if it lives (and is about to announce anew).
    -- Result: 1; 0 if that is not so.
    local lives = redis.call('HGET', KEYS[1], 'epoch') == ARGV[3]
    if lives ~= (ARGV[4] == '1') then return 0 end
    local held = ARGV[1] .. 'held:' .. ARGV[2] .. ':'
    for first = 0, 255 do
      local four = held .. string.char(first)
      redis.call('UNLINK', four .. '\\0', four .. '\\64', four .. '\\128', four .. '\\192')
    end
    if not lives then redis.call('SREM', KEYS[2], ARGV[2]) end
    return 1
    """

    DEAD = """
    -- KEYS[1]: set of incarnations. ARGV[1]: key prefix. Result: the incarnations that do not live.
    local dead = {}
    for _, incarnation in ipairs(redis.call('SMEMBERS', KEYS[1])) do
      local id, epoch = string.match(incarnation, '^(.*):(%d+)$')
      if redis.call('HGET', ARGV[1] .. 'instance:' .. id, 'epoch') ~= epoch then dead[#dead + 1] = incarnation end
    end
    return dead
    """

    LEAVE = """
    -- KEYS[1]: instance key. ARGV: epoch. Result: 1 if the key was this epoch's, and is gone now; else 0.
    if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
    return redis.call('DEL', KEYS[1])
    """

    BATCH = 512
    """Entries that one call writes or forgets: about a millisecond of Redis, 9 KB on the wire."""
    AT_ONCE = 4
    """Calls a round trip when everything is announced: look-ups must not wait for more."""

    def __init__(
        self, client: store.Client, description: StageDescription, *, ttl_s: float, call_timeout_s: float = 2.0
    ) -> None:
        """Every method may also raise RedisError, OSError, or TimeoutError after `call_timeout_s` of one call."""
        self._client = client
        self._id = description.instance_id
        self._epoch = str(description.epoch)
        self._incarnation = store.incarnation(self._id, description.epoch)
        self._description = store.description_to_json(description)
        self._call_timeout_s = call_timeout_s
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._sequence = 0
        self._begin: Any = client.register_script(self.BEGIN)
        self._apply: Any = client.register_script(self.APPLY)
        self._clear: Any = client.register_script(self.CLEAR)
        self._dead: Any = client.register_script(self.DEAD)
        self._leave: Any = client.register_script(self.LEAVE)
        self._key = store.instance_key(self._id)

    async def begin(self, *, take_over: bool) -> None:
        """Claim the id: whatever was announced under it before does not score. Superseded (unless `take_over`)."""
        self._sequence = 0
        args = [self._incarnation, self._epoch, self._ttl_ms, self._description, "1" if take_over else "0"]
        self._check(await self._call(self._begin(keys=[self._key, store.INSTANCES], args=args)))

    async def announce(self, hashes: Sequence[bytes]) -> None:
        """After `begin`: forget what was announced before, write `hashes`; then it scores. OutOfStep, Superseded."""
        self._check(await self._forget(self._incarnation, lives=True))
        await self.sweep()
        batches = [hashes[start : start + self.BATCH] for start in range(0, len(hashes), self.BATCH)]
        for start in range(0, len(batches), self.AT_ONCE):
            async with self._client.pipeline(transaction=False) as pipe:
                for batch in batches[start : start + self.AT_ONCE]:
                    await self._send([CacheChange(True, block) for block in batch], complete=False, client=pipe)
                for result in await self._call(pipe.execute()):
                    self._check(result)
        await self.apply()

    async def apply(self, changes: Iterable[CacheChange] = ()) -> None:
        """Write up to `BATCH` changes and renew the instance key; none: a heartbeat. OutOfStep, Superseded."""
        self._check(await self._call(self._send(changes, complete=True, client=self._client)))

    def _send(self, changes: Iterable[CacheChange], *, complete: bool, client: Any) -> Awaitable[Any]:
        packed = b"".join((b"+" if change.added else b"-") + change.block_hash for change in changes)
        args = [store.PREFIX, self._incarnation, self._epoch, self._sequence, self._ttl_ms]
        args += ["1" if complete else "0", packed]
        self._sequence += 1
        sent: Awaitable[Any] = self._apply(keys=[self._key], args=args, client=client)
        return sent

    async def leave(self) -> None:
        """Stop scoring at once, then forget everything; leaves another epoch alone."""
        if await self._call(self._leave(keys=[self._key], args=[self._epoch])):
            await self._forget(self._incarnation, lives=False)

    async def sweep(self) -> None:
        """Forget what dead incarnations left."""
        for incarnation in await self._call(self._dead(keys=[store.INSTANCES], args=[store.PREFIX])):
            await self._forget(incarnation.decode(), lives=False)

    async def eviction(self) -> str:
        """Redis's maxmemory-policy. Anything but noeviction drops entries unseen once its memory is full."""
        memory: Any = self._client.info("memory")
        return str((await self._call(memory)).get("maxmemory_policy", "unknown"))

    async def _forget(self, incarnation: str, *, lives: bool) -> int:
        instance_id, _, epoch = incarnation.rpartition(":")
        keys = [store.instance_key(instance_id), store.INSTANCES]
        args = [store.PREFIX, incarnation, epoch, "1" if lives else "0"]
        return int(await self._call(self._clear(keys=keys, args=args)))

    async def _call(self, call: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self._call_timeout_s):
            return await call

    def _check(self, result: int) -> None:
        if result == 0:
            raise OutOfStep(f"redis does not hold what {self._id} wrote last")
        if result == -1:
            raise Superseded(f"another process announces itself as {self._id}")
