"""Runs one plan: packs the batch, calls the model, draws tokens. Knows no queue, and changes no sequence."""

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.sampler import Decision, decide, is_plain_greedy
from kvrelay.engine.scheduler import Chunk
from kvrelay.kvcache.pool import KvPool
from kvrelay.model.batch import StepBatch


class Model(Protocol):
    """What the engine needs of a model."""

    def forward(self, batch: StepBatch, kv: Tensor) -> Tensor:
        """Logits [R, vocab] of batch.logit_rows; writes the new tokens' KV into the pool tensor kv."""


class Runner:
    """A model and the pool it works on."""

    def __init__(self, model: Model, pool: KvPool, eos_token_ids: Seq[int]) -> None:
        self._model = model
        self._pool = pool
        self._eos_token_ids = tuple(eos_token_ids)

    def run(self, chunks: Seq[Chunk]) -> list[Decision]:
        """Computes all chunks in one batch; returns one decision for each chunk that samples, in order."""
        logits = self._model.forward(pack(chunks, self._pool.layout.block_tokens), self._pool.tensor)
        return self._draw(logits, [chunk for chunk in chunks if chunk.samples])

    def _draw(self, logits: Tensor, chunks: list[Chunk]) -> list[Decision]:
        if not chunks:
            return []
        plain = [is_plain_greedy(chunk.seq.spec.sampling, chunk.seq.next_index) for chunk in chunks]
        best: list[int] = logits.argmax(-1).tolist() if any(plain) else []
        rows = None if all(plain) else logits.to("cpu", torch.float64).numpy()
        return [
            Decision(best[row]) if rows is None or plain[row] else self._decide(rows[row], chunk)
            for row, chunk in enumerate(chunks)
        ]

    def _decide(self, row: "np.ndarray[tuple[int], np.dtype[np.float64]]", chunk: Chunk) -> Decision:
        seq = chunk.seq
        output_ids = seq.ids[seq.prompt_len :]
        return decide(row, seq.spec.sampling, seq.spec.prompt_ids, output_ids, seq.next_index, self._eos_token_ids)


def pack(chunks: Seq[Chunk], block_tokens: int) -> StepBatch:
    """Lays the chunks' new tokens end to end."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    logit_rows: list[int] = []
    for chunk in chunks:
        table = chunk.seq.table
        token_ids += chunk.seq.ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        slots += [table[at // block_tokens] * block_tokens + at % block_tokens for at in range(chunk.start, chunk.end)]
        query_starts.append(len(token_ids))
        if chunk.samples:
            logit_rows.append(len(token_ids) - 1)
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        query_starts=query_starts,
        context_lens=[chunk.end for chunk in chunks],
        block_tables=[chunk.seq.table[: -(-chunk.end // block_tokens)] for chunk in chunks],
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
