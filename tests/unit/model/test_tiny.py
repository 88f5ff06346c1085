"""The tiny model is the same everywhere, wanders when greedy, and ends now and then."""

import torch

from kvrelay.model.weights import load_model
from tests.unit.model.paging import Pool, Running, step


def answer(prompt: bytes, tokens: int, generator: torch.Generator | None = None) -> list[int]:
    """Greedy, or sampled with a generator, up to and including EOS."""
    loaded = load_model("tiny")
    pool, sequence, out = Pool(loaded.config, torch.float64), Running(list(prompt)), []
    (logits,) = step(loaded.model, pool, [(sequence, len(prompt))])
    while len(out) < tokens and loaded.config.eos_token_ids[0] not in out:
        row = logits[-1]
        out.append(int(row.argmax() if generator is None else row.softmax(0).multinomial(1, generator=generator)))
        sequence.ids.append(out[-1])
        (logits,) = step(loaded.model, pool, [(sequence, 1)])
    return out


def test_two_loads_are_equal_and_its_identity_is_known() -> None:
    one, two = load_model("tiny"), load_model("tiny")
    assert one.layout == two.layout
    assert one.config == two.config and one.config.vocab_size == 264
    assert one.layout.dtype == "float64" and one.layout.block_bytes == 2 * 2 * 2 * 16 * 8 * 8


def test_greedy_answers_wander_and_depend_on_the_prompt() -> None:
    first, second = answer(b"hello", 80), answer(b"hellp", 80)
    assert first != second
    assert len(set(first)) > 20


def test_sampled_answers_end_sometimes_but_not_at_once() -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = [len(answer(b"abc", 120, generator)) for _ in range(12)]
    assert any(length < 120 for length in lengths)
    assert max(lengths) > 40
