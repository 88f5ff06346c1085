"""bench.transfer's sections about KV beside other work: streams that decode meanwhile, prefill that overlaps."""

import asyncio
import time
import uuid
from typing import Any

import numpy as np

from bench.figures import Figure
from bench.kv_link import BLOCK_BYTES, Pusher, pusher
from bench.kv_receiver import LAYOUT, BytesPool
from bench.output import Report
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel
from kvrelay.rpc.sampling import sampling_to_proto
from kvrelay.transfer.feed import BlockFeed
from kvrelay.types import Sampling

PACE_MS = 25.0
RATE_BYTES_PER_S = 125e6
SEGMENT_S = 4.0
"""Idle and receiving take turns of this length."""
SETTLE_S = 0.3
"""At the beginning of each turn, not counted."""
PUSH_BLOCKS = 34


async def itl_jitter(report: Report, streams: int, gaps: int) -> None:
    """P99 gap between tokens while KV comes at 1 Gbit/s ÷ the same without."""
    pool = BytesPool(PUSH_BLOCKS, filled=True)
    pace = f"fixed={PACE_MS:g}"
    async with pusher("bulk", pool, module="bench.kv_stage", options={"pace": pace}) as ours:
        seen = Gaps()
        async with open_channel(ours.there.told["stage"], Purpose.TOKENS) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            epoch = ours.there.told["epoch"]
            running = [asyncio.create_task(stream(stub, epoch, number, seen)) for number in range(streams)]
            while min(len(seen.idle), len(seen.busy)) < gaps:
                for kind in (seen.idle, seen.busy):
                    seen.into = None
                    push = asyncio.create_task(receiving(ours)) if kind is seen.busy else None
                    await asyncio.sleep(SETTLE_S)
                    seen.into = kind
                    await asyncio.sleep(min(SEGMENT_S, gaps * PACE_MS / 1e3 / streams + 0.1))
                    seen.into = None
                    if push is not None:
                        push.cancel()
                        await asyncio.gather(push, return_exceptions=True)
                if any(task.done() for task in running):
                    raise RuntimeError("a stream ended early")
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    idle, busy = (np.percentile(kind, [50, 99, 99.9]) for kind in (seen.idle, seen.busy))
    report.figures["itl_jitter"] = Figure(float(busy[1] / idle[1]), target="<= 1.3")
    rows = [
        [name, f"{len(kind)}", *(f"{ms:.2f}" for ms in found)]
        for name, kind, found in (("idle", seen.idle, idle), ("receiving 1 Gbit/s", seen.busy, busy))
    ]
    report.tables.append(
        (f"ITL of {streams} streams, {PACE_MS:g} ms a step", ["", "gaps", "P50 ms", "P99", "P99.9"], rows)
    )
    report.data["itl_ms"] = {"idle": seen.idle, "busy": seen.busy, "received_bytes": seen.received}


class Gaps:
    """Gaps between tokens in ms, by what went on."""

    def __init__(self) -> None:
        self.idle: list[float] = []
        self.busy: list[float] = []
        self.into: list[float] | None = None
        self.received = 0


async def stream(stub: Any, epoch: int, number: int, seen: Gaps) -> None:
    """Decodes without end, request after request."""
    for turn in range(1000):
        call: Any = stub.Decode()
        ids = [(number * 31 + turn * 7 + i) % 250 for i in range(16)]
        how = Sampling(seed=1, max_tokens=3000, temperature=0.0, ignore_eos=True)
        opening = decode_pb2.OpenLeg(
            request_id=uuid.uuid4().hex,
            prompt_ids=ids,
            sampling=sampling_to_proto(how),
            epoch=epoch,
            local_prefill=True,
        )
        await call.write(decode_pb2.DecodeRequest(open=opening))
        await call.write(decode_pb2.DecodeRequest(resume=decode_pb2.Resume(first_index=0, ids=[7])))
        last: float | None = None
        async for event in call:
            if event.WhichOneof("event") != "tokens":
                continue
            now = time.monotonic()
            if last is not None and seen.into is not None:
                seen.into.append((now - last) * 1e3)
            last = now


async def receiving(ours: Pusher) -> None:
    """Pushes at 1 Gbit/s, paced by what is published, until cancelled."""
    while True:
        feed = BlockFeed(range(PUSH_BLOCKS))
        push = asyncio.create_task(ours.push(PUSH_BLOCKS, feed=feed))
        try:
            began = time.monotonic()
            while feed.published < PUSH_BLOCKS:
                due = int((time.monotonic() - began) * RATE_BYTES_PER_S / BLOCK_BYTES)
                feed.publish(min(due, PUSH_BLOCKS))
                await asyncio.sleep(BLOCK_BYTES / RATE_BYTES_PER_S / 2)
            await push
        except asyncio.CancelledError:
            feed.publish(PUSH_BLOCKS)  # it ends by itself, at once
            await push
            raise


async def overlap(report: Report, tokens: int, chunk: int, chunk_s: float, rounds: int) -> None:
    """From the end of prefill to the commit: blocks pushed chunk by chunk ÷ all afterwards. Prefill is a clock."""
    blocks, step = tokens // LAYOUT.block_tokens, chunk // LAYOUT.block_tokens
    pool = BytesPool(blocks, filled=True)
    during, after = [], []
    async with pusher("bulk", pool) as ours:
        for number in range(rounds + 1):
            feed = BlockFeed(range(blocks))
            push = asyncio.create_task(ours.push(blocks, feed=feed))
            for done in range(step, blocks + 1, step):
                await asyncio.sleep(chunk_s)
                feed.publish(done)
            ended = time.monotonic()
            await push
            overlapped = ours.committed_at - ended
            await ours.check(blocks)
            began = time.monotonic()
            await ours.push(blocks)
            afterwards = ours.committed_at - began
            await ours.check(blocks)
            if number:
                during.append(overlapped)
                after.append(afterwards)
    ratios = [a / b for a, b in zip(during, after, strict=True)]
    report.figures["overlap"] = Figure(float(np.median(during) / np.median(after)), min(ratios), max(ratios), "<= 0.15")
    report.data["overlap_s"] = {"during": during, "after": after}
