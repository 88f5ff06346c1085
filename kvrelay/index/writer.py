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
    -- KEYS[1]: instance key, KEYS[2]: set of instance ids.
    -- ARGV: id, epoch, ttl_ms, description, '1' to take the id from another epoch that lives.
    -- Result: 1; -1 if another epoch lives.
    local epoch = redis.call('HGET', KEYS[1], 'epoch')
    if epoch and epoch ~= ARGV[2] and ARGV[5] ~= '1' then return -1 end
    redis.call('DEL', KEYS[1])
    redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'sequence', 0, 'description', ARGV[4])
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 1
    """

    APPLY = """
    -- Applies changes in order, and renews the instance key.
    -- KEYS[1]: instance key, KEYS[2]: the instance's own hashes.
    -- ARGV: key prefix, id, epoch, sequence, ttl_ms, '1' if the cache is announced in full with this,
    --       changes ('+' or '-', then the hash; 17 bytes each).
    -- Result: 1; 0 if the key is gone or of another sequence; -1 if another epoch lives.
    local now = redis.call('HMGET', KEYS[1], 'epoch', 'sequence')
    if now[1] and now[1] ~= ARGV[3] then return -1 end
    if not now[1] or now[2] ~= ARGV[4] then return 0 end
    local prefix, id, epoch, changes = ARGV[1] .. 'block:', ARGV[2], ARGV[3], ARGV[7]
    for i = 1, #changes, 17 do
      local hash = string.sub(changes, i + 1, i + 16)
      if string.sub(changes, i, i) == '+' then
        redis.call('HSET', prefix .. hash, id, epoch)
        redis.call('SADD', KEYS[2], hash)
      else
        redis.call('HDEL', prefix .. hash, id)
        redis.call('SREM', KEYS[2], hash)
      end
    end
    redis.call('HINCRBY', KEYS[1], 'sequence', 1)
    if ARGV[6] == '1' then redis.call('HSET', KEYS[1], 'scoring', epoch) end
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
    return 1
    """

    CLEAR = """
    -- Forgets some of an instance's entries.
    -- KEYS[1]: instance key, KEYS[2]: the instance's own hashes, KEYS[3]: set of instance ids.
    -- ARGV: key prefix, id, epoch, how many.
    -- Only while `epoch` lives, or nobody does if it is ''.
    -- Result: how many were forgotten; -1 if it is not so. An id with nothing left and nobody living is forgotten too.
    local epoch = redis.call('HGET', KEYS[1], 'epoch') or ''
    if epoch ~= ARGV[3] then return -1 end
    local hashes = redis.call('SPOP', KEYS[2], ARGV[4])
    for _, hash in ipairs(hashes) do redis.call('HDEL', ARGV[1] .. 'block:' .. hash, ARGV[2]) end
    if epoch == '' and redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SREM', KEYS[3], ARGV[2]) end
    return #hashes
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
        self._description = store.description_to_json(description)
        self._call_timeout_s = call_timeout_s
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._sequence = 0
        self._begin: Any = client.register_script(self.BEGIN)
        self._apply: Any = client.register_script(self.APPLY)
        self._clear: Any = client.register_script(self.CLEAR)
        self._leave: Any = client.register_script(self.LEAVE)
        self._keys = [store.instance_key(self._id), store.own_key(self._id)]

    async def begin(self, *, take_over: bool) -> None:
        """Claim the id: whatever was announced under it before does not score. Superseded (unless `take_over`)."""
        self._sequence = 0
        args = [self._id, self._epoch, self._ttl_ms, self._description, "1" if take_over else "0"]
        self._check(await self._call(self._begin(keys=[self._keys[0], store.INSTANCES], args=args)))

    async def announce(self, hashes: Sequence[bytes]) -> None:
        """After `begin`: forget what was announced before, write `hashes`; then it scores. OutOfStep, Superseded."""
        await self._forget(self._id, self._epoch)
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
        args = [store.PREFIX, self._id, self._epoch, self._sequence, self._ttl_ms, "1" if complete else "0", packed]
        self._sequence += 1
        sent: Awaitable[Any] = self._apply(keys=self._keys, args=args, client=client)
        return sent

    async def leave(self) -> None:
        """Stop scoring at once, then forget everything; leaves another epoch alone."""
        if await self._call(self._leave(keys=self._keys[:1], args=[self._epoch])):
            await self._forget(self._id, "")

    async def sweep(self) -> None:
        """Forget a batch of what each dead instance left."""
        members: Any = self._client.smembers(store.INSTANCES)
        for member in await self._call(members):
            if (instance_id := member.decode()) != self._id:
                await self._call(self._clear_some(instance_id, "", self._client))

    async def _forget(self, instance_id: str, epoch: str) -> None:
        left = True
        while left:
            async with self._client.pipeline(transaction=False) as pipe:
                for _ in range(self.AT_ONCE):
                    await self._clear_some(instance_id, epoch, pipe)
                counts = await self._call(pipe.execute())
            if -1 in counts:
                raise OutOfStep(instance_id)
            left = 0 not in counts

    def _clear_some(self, instance_id: str, epoch: str, client: Any) -> Awaitable[Any]:
        keys = [store.instance_key(instance_id), store.own_key(instance_id), store.INSTANCES]
        args = [store.PREFIX, instance_id, epoch, self.BATCH]
        sent: Awaitable[Any] = self._clear(keys=keys, args=args, client=client)
        return sent

    async def _call(self, call: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self._call_timeout_s):
            return await call

    def _check(self, result: int) -> None:
        if result == 0:
            raise OutOfStep(f"redis does not hold what {self._id} wrote last")
        if result == -1:
            raise Superseded(f"another process announces itself as {self._id}")
