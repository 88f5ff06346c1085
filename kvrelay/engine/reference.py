"""The reference stream: one request alone, by the plainest loop. Knows no scheduler, no cache, no batch of two.

Demo and tests compare every pipeline with it; where tokens differ, the margin says whether that was a near-tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.finish import finish_reason
from kvrelay.engine.margin import margin
from kvrelay.engine.noise import Floats
from kvrelay.engine.sampler import decide
from kvrelay.kvcache.pool import KvPool
from kvrelay.model.batch import StepBatch
from kvrelay.model.weights import LoadedModel
from kvrelay.types import FinishReason, Sampling

_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """What one engine alone answers."""

    ids: tuple[int, ...]
    reason: FinishReason
    margins: tuple[float, ...] = ()
    """One per id: how near the draw was to another outcome; empty if they were not asked for."""


def generate_reference(
    loaded: LoadedModel,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_model_tokens: int = 0,
    with_margins: bool = True,
) -> ReferenceResult:
    """Generates to the end. max_model_tokens: the stages' limit of prompt + output; 0: the model's."""
    context = min(max_model_tokens or loaded.config.max_positions, loaded.config.max_positions)
    limit = min(sampling.max_tokens, context - len(prompt_ids))
    eos = loaded.config.eos_token_ids
    solo = _Solo(loaded, len(prompt_ids) + limit)
    row = solo.feed(prompt_ids)
    ids: list[int] = []
    margins: list[float] = []
    while True:
        if with_margins:
            margins.append(margin(row, sampling, prompt_ids, ids, len(ids), eos))
        ids.append(decide(row, sampling, prompt_ids, ids, len(ids), eos).token)
        reason = finish_reason(sampling, ids[-1], len(ids), limit, eos)
        if reason is not None:
            return ReferenceResult(tuple(ids), reason, tuple(margins))
        row = solo.feed(ids[-1:])


def margin_at(
    loaded: LoadedModel, prompt_ids: Sequence[int], output_ids_before: Sequence[int], index: int, sampling: Sampling
) -> float:
    """How near the draw of output `index`, after output_ids_before (`index` tokens), is to another outcome."""
    solo = _Solo(loaded, len(prompt_ids) + len(output_ids_before))
    row = solo.feed([*prompt_ids, *output_ids_before])
    return margin(row, sampling, prompt_ids, output_ids_before, index, loaded.config.eos_token_ids)


class _Solo:
    """A model and a pool for one sequence: block i is its i-th block."""

    def __init__(self, loaded: LoadedModel, tokens: int) -> None:
        self._model = loaded.model
        self._block_tokens = loaded.layout.block_tokens
        self._pool = KvPool(loaded.layout, -(-tokens // self._block_tokens), loaded.model.device)
        self._done = 0

    def feed(self, ids: Sequence[int]) -> Floats:
        """Computes the next ids; the logits [vocab] after the last."""
        row: Floats | None = None
        for start in range(0, len(ids), _CHUNK_TOKENS):
            row = self._chunk(ids[start : start + _CHUNK_TOKENS])
        if row is None:
            raise ValueError("nothing to compute")
        return row

    def _chunk(self, ids: Sequence[int]) -> Floats:
        start, end = self._done, self._done + len(ids)
        at = torch.arange(start, end, dtype=torch.int64)  # also the slots, since block i is block i
        batch = StepBatch(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            positions=at,
            slots=at,
            query_starts=[0, len(ids)],
            context_lens=[end],
            block_tables=[list(range(-(-end // self._block_tokens)))],
            logit_rows=torch.tensor([len(ids) - 1], dtype=torch.int64),
        )
        self._done = end
        row: Floats = self._model.forward(batch, self._pool.tensor)[0].to("cpu", torch.float64).numpy()
        return row
