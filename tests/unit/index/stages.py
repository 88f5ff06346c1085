"""What the index tests speak of: stages, chains of hashes, and waiting for something to be so."""

import asyncio
import hashlib
import inspect
from collections.abc import Callable

from kvrelay.index import store
from kvrelay.types import CacheChange, LayoutFingerprint, Role, StageDescription

LAYOUT = LayoutFingerprint("w", 2, 2, 8, 16, "float32", "r")


def stage(instance_id: str, epoch: int = 1) -> StageDescription:
    return StageDescription(
        instance_id=instance_id,
        epoch=epoch,
        role=Role.MAIN,
        site="b",
        address="127.0.0.1:1",
        model="tiny",
        tokenizer="t",
        layout=LAYOUT,
        vocab_size=258,
        max_model_tokens=4096,
        pool_blocks=64,
        max_running=4,
        eos_token_ids=(257,),
    )


def chain(text: str) -> list[bytes]:
    """One chained hash per character: texts with a common beginning share its hashes."""
    return [hashlib.blake2b(text[: n + 1].encode(), digest_size=16).digest() for n in range(len(text))]


def added(text: str) -> list[CacheChange]:
    return [CacheChange(True, block) for block in chain(text)]


def removed(*texts: str) -> list[CacheChange]:
    """The last block of each text."""
    return [CacheChange(False, chain(text)[-1]) for text in texts]


async def until(holds: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Returns once `holds()` (or what it awaits) is true; TimeoutError if it never is."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = holds()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(0.002)


async def held(client: store.Client, instance_id: str) -> set[bytes]:
    """What Redis keeps of the instance, of whatever epoch."""
    blocks: set[bytes] = set()
    async for key in client.scan_iter(match=f"{store.PREFIX}held:{instance_id}:*", count=1000):
        blocks.update(await client.hkeys(key))
    return blocks
