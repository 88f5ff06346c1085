"""The reference engine in its own process answers what the same engine answers here."""

import asyncio

import pytest

from kvrelay.cli.cluster import ClusterError
from kvrelay.cli.demo.reference import answer, engine
from kvrelay.engine.reference import generate_reference
from kvrelay.model.weights import load_model
from kvrelay.types import Sampling

PROMPT = [40, 41, 42, 43]
SAMPLING = Sampling(seed=3, max_tokens=6, ignore_eos=True, stop_token_ids=(200,))


async def test_its_process_answers_as_the_engine_does() -> None:
    def here() -> tuple[list[int], list[float]]:
        result = generate_reference(load_model("tiny", block_tokens=16), PROMPT, SAMPLING)
        return list(result.ids), list(result.margins)

    expected = await asyncio.to_thread(here)
    async with engine("tiny", "") as process:
        assert [await answer(process, PROMPT, SAMPLING) for _ in range(2)] == [expected, expected]
    assert process.returncode is not None


async def test_an_engine_that_cannot_start_says_why() -> None:
    async with engine("/no/such/model.gguf", "") as process:
        with pytest.raises(ClusterError) as failed:
            await answer(process, PROMPT, SAMPLING)
    assert "/no/such/model.gguf" in failed.value.tail[-1]
