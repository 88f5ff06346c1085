"""When an answer is complete. Knows ids and limits; stop strings are the router's business."""

from collections.abc import Collection

from kvrelay.types import FinishReason, Sampling


def finish_reason(
    sampling: Sampling, token: int, completion_tokens: int, length_limit: int, eos_token_ids: Collection[int]
) -> FinishReason | None:
    """Why the answer ends with `token`, its completion_tokens-th; None: it goes on.

    length_limit: completion tokens that max_tokens and the context allow.
    """
    if token in eos_token_ids and not sampling.ignore_eos:
        return FinishReason.EOS
    if token in sampling.stop_token_ids:
        return FinishReason.STOP_TOKEN
    if completion_tokens >= length_limit:
        return FinishReason.LENGTH
    return None
