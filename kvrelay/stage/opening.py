"""Checks what a router expects of this very stage, before anything is reserved. Knows what it is, nothing that runs."""

from collections.abc import Sequence

from kvrelay.errors import ProtocolViolation
from kvrelay.kvcache import hashing
from kvrelay.types import StageDescription


def check_epoch(stage: StageDescription, epoch: int) -> None:
    """ProtocolViolation unless the caller means this process, not an earlier one at the same address."""
    if epoch != stage.epoch:
        raise ProtocolViolation(f"epoch: {epoch} expected, but {stage.instance_id} has {stage.epoch}: it has restarted")


def check_hashes(stage: StageDescription, salt: str, prompt_ids: Sequence[int], expected: Sequence[bytes]) -> None:
    """ProtocolViolation if `expected` (may be empty) are not the hashes of the prompt's whole blocks here.

    A few ms for a prompt of 64K tokens: not for the event loop.
    """
    if not expected:
        return
    mine = hashing.block_hashes(hashing.root_hash(stage.layout, salt), prompt_ids, stage.layout.block_tokens)
    if len(mine) != len(expected):
        raise ProtocolViolation(f"block_hashes: {len(expected)} expected, but the prompt has {len(mine)} whole blocks")
    for block, (here, there) in enumerate(zip(mine, expected, strict=True)):
        if here != there:
            raise ProtocolViolation(f"block_hashes[{block}]: {there.hex()} expected, but it is {here.hex()} here")
