"""bench.transfer's two processes: a round moves every byte, and a wrong one is found out."""

import pytest

from bench.kv_link import BLOCK_BYTES, WrongBytes, pusher, remote
from bench.kv_peers import BareGrpcSource, RawSource
from bench.kv_receiver import BytesPool


@pytest.mark.parametrize("kind", ["bulk", "grpc"])
async def test_a_round_moves_the_pool_and_a_wrong_byte_is_found(kind: str) -> None:
    pool = BytesPool(3, filled=True)
    async with pusher(kind, pool) as ours:
        moved = await ours.round(3)
        assert moved.payload_bytes == 3 * BLOCK_BYTES
        assert moved.seconds > 0
        pool.array[2 * BLOCK_BYTES + 5] ^= 1
        with pytest.raises(WrongBytes):
            await ours.round(3)


async def test_the_peers_move_the_same_bytes() -> None:
    pool = BytesPool(2, filled=True)
    async with remote("raw", 2) as raw, remote("bare-grpc", 2) as bare:
        sockets = await RawSource.connect(raw.told["address"])
        stream = BareGrpcSource(bare.told["address"])
        for _ in range(2):
            for there, send in ((raw, sockets.send), (bare, stream.send)):
                await send(pool.data)
                assert (await there.ask("check", bytes=2 * BLOCK_BYTES))["equal"]
        sockets.close()
        await stream.close()
