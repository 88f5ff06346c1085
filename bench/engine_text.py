"""The fixed text of bench.engine's perplexity: Python's language reference, which every interpreter carries."""

from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import numpy as np

from kvrelay.text.tokenizer import load_tokenizer

WINDOW = 1024
TOPICS = ("execmodel", "import", "try", "calls", "function", "assignment")

Logits = np.ndarray[tuple[int, int], np.dtype[np.floating]]


def perplexity(model: str, windows: int, logits: Callable[[Sequence[int]], Logits]) -> float:
    """exp of the mean surprise of each token after a window's first. logits: ids -> [len(ids), vocab]."""
    ids = load_tokenizer(model).encode("\n".join(topics[name] for name in TOPICS))
    if len(ids) < windows * WINDOW:
        raise ValueError(f"the text has {len(ids)} tokens only")
    surprise = []
    for start in range(0, windows * WINDOW, WINDOW):
        window = ids[start : start + WINDOW]
        found = logits(window)[:-1]
        best = found.max(1, keepdims=True)
        total = np.log(np.exp(found - best).sum(1, dtype=np.float64)) + best[:, 0]
        surprise.append(total - found[np.arange(len(found)), window[1:]])
    return float(np.exp(np.concatenate(surprise).mean()))
