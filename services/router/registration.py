"""What a stage must agree on with the others before it may serve. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.types import StageDescription


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The router's own tokenizer: ids mean what it says."""

    identity: str
    vocab_size: int


def refusal(stage: StageDescription, tokenizer: TokenizerFacts, others: Iterable[StageDescription]) -> str | None:
    """Why this stage may not serve beside the others, with both values; None: it may."""
    if stage.tokenizer != tokenizer.identity:
        return f"tokenizer: {tokenizer.identity} at the router, {stage.tokenizer} at {stage.instance_id}"
    if stage.vocab_size < tokenizer.vocab_size:
        return f"vocab_size: {tokenizer.vocab_size} at the router, {stage.vocab_size} at {stage.instance_id}"
    for other in others:
        difference = _difference(other, stage)
        if difference is not None:
            return difference
    return None


def _difference(other: StageDescription, stage: StageDescription) -> str | None:
    for name in ("vocab_size", "eos_token_ids"):
        mine, theirs = getattr(other, name), getattr(stage, name)
        if mine != theirs:
            return f"{name}: {mine} at {other.instance_id}, {theirs} at {stage.instance_id}"
    layout = other.layout.difference(stage.layout)
    if layout is not None:
        return f"layout.{layout} (here {other.instance_id}, there {stage.instance_id})"
    if other.instance_id == stage.instance_id:
        return f"instance_id: {stage.instance_id} is at {other.address} (epoch {other.epoch}) and at {stage.address}"
    return None
