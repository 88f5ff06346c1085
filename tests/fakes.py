"""A fake model: its output depends on exactly what can be read through the KV pool, and costs microseconds."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kvrelay.model.batch import StepBatch
from kvrelay.model.config import ModelConfig
from kvrelay.model.weights import LoadedModel
from kvrelay.types import LayoutFingerprint


class FakeTransformer:
    """Writes token id + 1 and position into each KV slot; logits are a hash of all (id, position) read back from there.

    So a wrong block, a wrong slot, stale KV or a wrong order gives other tokens, or an AssertionError here.
    """

    def __init__(self, vocab_size: int = 64, spread: float = 4.0) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float64
        self.vocab_size = vocab_size
        self.spread = spread
        self.steps = 0
        self.tokens = 0
        self.batches: list[tuple[int, ...]] = []
        """Rows of each sequence, of every step."""
        self.error: BaseException | None = None
        """Raised by the next step."""

    def forward(self, batch: StepBatch, kv: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        cells, slots, ids, positions = self._slots(batch, kv)
        size = cells.shape[1]
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        cells[slots // size, slots % size, 0] = ids + 1
        cells[slots // size, slots % size, 1] = positions
        self.steps += 1
        self.tokens += len(ids)
        self.batches.append(tuple(np.diff(batch.query_starts).tolist()))
        rows = batch.logit_rows.tolist()
        logits = np.empty((len(rows), self.vocab_size))
        for out, row in enumerate(rows):
            at = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            logits[out] = self._logits(cells, batch.block_tables[at], int(positions[row]))
        return torch.from_numpy(logits)

    def _slots(self, batch: StepBatch, kv: Tensor) -> tuple[Any, Any, Any, Any]:
        """The pool's cells [block, slot, (id + 1, position)], and the batch as arrays, checked against its tables."""
        cells = kv[:, 0, 0, 0].numpy()
        slots, ids, positions = (part.numpy() for part in (batch.slots, batch.token_ids, batch.positions))
        size = cells.shape[1]
        for at, table in enumerate(batch.block_tables):
            start, end = batch.query_starts[at], batch.query_starts[at + 1]
            assert end > start
            assert positions[end - 1] + 1 == batch.context_lens[at]
            assert (np.diff(positions[start:end]) == 1).all()
            where = np.asarray(table)[positions[start:end] // size] * size + positions[start:end] % size
            assert (where == slots[start:end]).all(), "slots do not follow the block table"
        return cells, slots, ids, positions

    def _logits(self, cells: Any, table: Sequence[int], position: int) -> Any:
        at = np.arange(position + 1)
        seen = cells[table].reshape(-1, 2)[: position + 1]
        assert (seen[:, 1] == at).all(), "stale or foreign KV was read"
        words = seen[:, 0].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + at.astype(np.uint64)
        context = _mix(words * np.uint64(0xD1342543DE82EF95)).sum(dtype=np.uint64)
        noise = _mix(np.arange(self.vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + context)
        return noise / 2.0**64 * self.spread


def fake_layout(block_tokens: int = 4) -> LayoutFingerprint:
    """Two float64 a token and K or V."""
    return LayoutFingerprint(
        weights="fake", layers=1, kv_heads=1, head_dim=2, block_tokens=block_tokens, dtype="float64", rope="none"
    )


def fake_model(
    block_tokens: int = 4, vocab_size: int = 64, max_positions: int = 4096, eos_token_ids: tuple[int, ...] = (0,)
) -> LoadedModel:
    """A LoadedModel around a new FakeTransformer (`loaded.model`)."""
    config = ModelConfig(
        family="fake",
        vocab_size=vocab_size,
        hidden=2,
        intermediate=2,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        rope_theta=1.0,
        max_positions=max_positions,
        eos_token_ids=eos_token_ids,
    )
    return LoadedModel(model=cast(Any, FakeTransformer(vocab_size)), config=config, layout=fake_layout(block_tokens))


def fake_block_bytes(ids: Sequence[int], block: int, block_tokens: int) -> bytes:
    """The bytes of one whole block of a sequence with these ids, as a fake prefill stage would push them."""
    first = block * block_tokens
    kv = np.zeros((2, block_tokens, 2))
    kv[0, :, 0] = np.asarray(ids[first : first + block_tokens]) + 1
    kv[0, :, 1] = np.arange(first, first + block_tokens)
    return kv.tobytes()


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
