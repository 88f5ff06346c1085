"""bench.index on a small Redis: what it asks has the depth it says, and a wrong answer ends the run."""

import pytest

from bench.index import Plan, ask, chains, fill, holders_of, questions
from kvrelay.index.redis import RedisIndex
from kvrelay.index.server import start_redis

SMALL = Plan(blocks=512, instances=6, holders=3, prompt_blocks=64, lookups=10)


def test_every_document_has_as_many_holders_as_the_plan_says() -> None:
    assert all(len(set(holders_of(document, SMALL))) == 3 for document in range(8))
    assert {holder for document in range(8) for holder in holders_of(document, SMALL)} == set(range(6))


async def test_look_ups_find_the_depth_that_was_drawn_and_a_wrong_depth_is_an_error() -> None:
    async with start_redis() as server, RedisIndex(server.url, timeout_s=5) as index:
        filled, rates = await fill(server.url, SMALL)
        assert len(rates) == 6
        asked = questions(filled, SMALL, seed=1)
        assert len(await ask(index, asked, 3)) == 10
        assert {depth for _, depth in asked} <= {62, 51, 19}
        with pytest.raises(RuntimeError, match="expected 3 holders of 7 blocks"):
            await ask(index, [(filled.documents[0][:6] + chains(9, 1, 4)[0], 7)], 3)
