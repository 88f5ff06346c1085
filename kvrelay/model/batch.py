"""One step's packed work, as the engine hands it to the model. Knows no sequence, no scheduling, no sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T new tokens of S sequences, laid end to end; any mix of decode rows and prefill chunks.

    The tensors may be on any device; the model moves them to its own.
    """

    token_ids: Tensor
    """i64[T]."""
    positions: Tensor
    """i64[T], absolute in each sequence; consecutive within one."""
    slots: Tensor
    """i64[T]: block_id * block_tokens + offset, where each token's KV goes."""
    query_starts: Sequence[int]
    """S + 1 row numbers: sequence s has rows query_starts[s] .. query_starts[s + 1]; at least one row each."""
    context_lens: Sequence[int]
    """S: tokens that each sequence attends to, its new ones included."""
    block_tables: Sequence[Sequence[int]]
    """S lists of pool block ids that cover context_lens; may be longer."""
    logit_rows: Tensor
    """i64[R]: the rows of T whose logits are wanted; R may be 0."""
