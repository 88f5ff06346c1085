"""One engine in this process, asked one request at a time: what every answer must equal. Loads torch when asked."""

from collections.abc import Callable, Sequence

from kvrelay.cli.demo.asking import Asked
from kvrelay.cli.demo.verdict import Verdict, compare


def check_all(
    model: str, dtype: str, threads: int, asked: Sequence[Asked], observe: Callable[[], None]
) -> list[Verdict]:
    """A verdict on each answer, in order; `observe` is called after each. Takes long: call it in a thread.

    Nothing of the route is used: the prompt's ids, the sampling parameters and the seed make the answer.
    """
    import torch

    from kvrelay.engine.reference import generate_reference
    from kvrelay.model.weights import load_model

    torch.set_num_threads(threads)
    loaded = load_model(model, device="cpu", dtype=dtype, block_tokens=16)
    verdicts = []
    for one in asked:
        expected = generate_reference(loaded, list(one.prompt_ids), one.sampling)
        verdicts.append(compare(one.answer.ids, expected.ids, expected.margins))
        observe()
    return verdicts
