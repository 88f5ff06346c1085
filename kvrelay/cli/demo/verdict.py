"""Whether an answer equals the reference's. Pure: knows ids and margins, no engine."""

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE = 1e-3
"""Batch shapes change float32 logits by ~1e-6: a first difference of at most this margin is rounding, no error."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer compares with the reference."""

    matches: bool
    margin: float | None = None
    """Of the reference's choice where the answers first differ; None if they do not, or if one is cut short."""
    first_difference: int | None = None
    """Output index."""


def compare(ids: Sequence[int], reference: Sequence[int], margins: Sequence[float]) -> Verdict:
    """Equal, or first different where the reference's margin (one per reference id) is at most NEAR_TIE."""
    if list(ids) == list(reference):
        return Verdict(True)
    shorter = min(len(ids), len(reference))
    differs = next((i for i in range(shorter) if ids[i] != reference[i]), shorter)
    margin = margins[differs] if differs < shorter else None
    return Verdict(margin is not None and margin <= NEAR_TIE, margin, differs)
