"""What a stage tells of itself, how it drains and stops, what it counts, and what stops its start."""

import asyncio
import sys
import urllib.request
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.index.redis import RedisIndex
from kvrelay.index.server import redis_server
from kvrelay.kvcache import hashing
from kvrelay.proto.v1 import stage_pb2, stage_pb2_grpc
from kvrelay.rpc import convert
from kvrelay.rpc.channels import open_channel
from kvrelay.stage import service
from kvrelay.stage.app import StageApp
from kvrelay.types import Role
from kvrelay.wan.app import wan_emulator
from kvrelay.wan.settings import WanSettings
from tests.pipeline.stages import leg, prefill, prompt, reference, sampling, stage, target

HOW = sampling(20)


@pytest.fixture
async def app() -> AsyncIterator[StageApp]:
    async with stage(Role.MAIN, site="b", instance_id="m1", report_interval_s=5.0) as running:
        yield running


@pytest.fixture
async def stub(app: StageApp) -> AsyncIterator["stage_pb2_grpc.StageServiceAsyncStub"]:
    async with open_channel(app.address) as channel:
        yield stage_pb2_grpc.StageServiceStub(channel)


async def test_describe_says_what_the_stage_is(app: StageApp, stub: stage_pb2_grpc.StageServiceStub) -> None:
    told = convert.description_from_proto(await stub.Describe(stage_pb2.DescribeRequest()))
    assert told == app.description
    assert (told.instance_id, told.role, told.site, told.address) == ("m1", Role.MAIN, "b", app.address)
    assert told.pool_blocks == 128
    assert told.max_model_tokens == 2048


async def test_two_starts_have_two_epochs_and_names() -> None:
    async with stage(Role.RELAY) as one, stage(Role.RELAY) as two:
        assert one.description.epoch != two.description.epoch
        assert one.description.instance_id != two.description.instance_id


async def test_load_is_reported_at_once_and_on_every_change(
    app: StageApp, stub: stage_pb2_grpc.StageServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "IDLE_GAP_S", 3600.0)  # nothing but a change makes an idle stage speak
    watch = stub.WatchLoad(stage_pb2.WatchLoadRequest())
    async with asyncio.timeout(15):
        first = await watch.read()
        assert (first.running, first.blocks_total, first.blocks_free, first.draining) == (0, 128, 128, False)
        async with leg(app, prompt(40), HOW, local_prefill=True) as (call, _):
            await watch.read()
            await call.until("ready")
        while (await watch.read()).running:
            pass
    watch.cancel()


async def test_flush_drops_what_no_request_holds(app: StageApp, stub: stage_pb2_grpc.StageServiceStub) -> None:
    async with leg(app, prompt(40), HOW, local_prefill=True) as (call, _):
        await call.until("ready")
    await app.settle()
    assert (await stub.FlushCache(stage_pb2.FlushCacheRequest())).blocks == 2
    async with leg(app, prompt(40), HOW, local_prefill=True) as (call, _):
        assert (await call.expect("opened")).cached_tokens == 0


async def test_drain_refuses_new_legs_and_waits_for_the_running_ones(
    app: StageApp, stub: stage_pb2_grpc.StageServiceStub
) -> None:
    watch = stub.WatchLoad(stage_pb2.WatchLoadRequest())
    await watch.read()
    async with leg(app, prompt(40), HOW, local_prefill=True) as (call, _):
        await call.until("ready")
        draining = asyncio.ensure_future(stub.Drain(stage_pb2.DrainRequest()))
        async with asyncio.timeout(3):
            while not (await watch.read()).draining:
                pass
        async with leg(app, prompt(40), HOW) as (second, _):
            code, details = await second.refused()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "m1 is draining" in details
        assert not draining.done()
        await call.resume()
        await call.until("finished")
        async with asyncio.timeout(3):
            await draining
    watch.cancel()


async def test_a_draining_prefill_stage_refuses_too() -> None:
    async with stage(Role.PREFILL) as p, open_channel(p.address) as channel:
        await stage_pb2_grpc.StageServiceStub(channel).Drain(stage_pb2.DrainRequest())
        async with prefill(p, prompt(10), HOW) as call:
            with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                await call.rest()


async def test_a_stage_that_stops_lets_running_requests_end_and_tells_its_watchers() -> None:
    async with stage(Role.MAIN, shutdown_grace_s=5.0, pace="fixed=5") as app:
        channel = open_channel(app.address)
        watch = stage_pb2_grpc.StageServiceStub(channel).WatchLoad(stage_pb2.WatchLoadRequest())
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        ids, how = prompt(20), sampling(40)

        async def request() -> list[int]:
            async with leg(app, ids, how, local_prefill=True) as (call, _):
                await call.resume()
                await call.until("tokens")
                started.set()
                await call.until("finished")
                return call.ids

        started = asyncio.Event()
        running = asyncio.ensure_future(request())
        await started.wait()
    assert await running == reference(ids, how)
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    reports = [report async for report in watch]
    assert reports[-1].draining
    await channel.close()


async def until_not_serving(address: str) -> None:
    async with open_channel(address) as channel, asyncio.timeout(2):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for reply in watch:
            if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return


async def test_an_engine_that_dies_fails_its_legs_and_the_stage() -> None:
    async with stage(Role.MAIN, settles=False) as app:
        async with leg(app, prompt(40), sampling(1500), local_prefill=True) as (call, _):
            await call.resume()
            await call.until("tokens")

            def broken(*_: object) -> None:
                raise RuntimeError("a broken step")

            app.core.driver.engine._runner.run = broken  # type: ignore[method-assign]
            code, details = await call.refused()
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "engine has failed" in details
        assert isinstance(await app.failed, RuntimeError)
        await until_not_serving(app.address)
        async with leg(app, prompt(40), HOW) as (second, _):
            assert (await second.refused())[0] in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


async def test_metrics_tell_of_pool_hits_bytes_and_legs() -> None:
    async with (
        stage(Role.MAIN, metrics_listen="127.0.0.1:0") as md,
        stage(Role.PREFILL, metrics_listen="127.0.0.1:0") as p,
    ):
        ids = prompt(40)
        for _ in range(2):
            async with leg(md, ids, HOW) as (call, t), prefill(p, ids, HOW, [target(md, t, instance_id="")]) as filling:
                await call.resume((await filling.until("first_token")).ids)
                await call.until("finished")
                await call.ended()
                await filling.rest()
        at_main, at_prefill = await scrape(md), await scrape(p)
    assert at_main["kvrelay_hit_tokens_total"] == 32
    assert at_main["kvrelay_prompt_tokens_total"] == 80
    assert at_main['kvrelay_legs_total{end="FINISHED"}'] == 2
    assert at_main["kvrelay_received_bytes_total"] == 2 * md.description.layout.block_bytes
    assert at_main['kvrelay_pool_blocks{state="cached"}'] > 0
    assert at_main["kvrelay_preemptions_total"] == 0
    assert at_main["kvrelay_output_tokens_total"] == 38
    peer = md.description.instance_id
    assert at_prefill[f'kvrelay_link_saved_bytes_total{{peer="{peer}"}}'] == 2 * md.description.layout.block_bytes
    assert at_prefill[f'kvrelay_pushes_total{{outcome="committed",peer="{peer}"}}'] == 2


async def scrape(app: StageApp) -> dict[str, float]:
    def read() -> str:
        with urllib.request.urlopen(f"http://{app.metrics_address}/metrics") as reply:
            return str(reply.read(), "utf-8")

    lines = [line for line in (await asyncio.to_thread(read)).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_what_the_cache_holds_is_announced_and_withdrawn_at_the_end() -> None:
    ids = prompt(40)
    async with redis_server() as url:
        index = RedisIndex(url)
        async with index:
            async with stage(Role.MAIN, redis_url=url, instance_id="m1") as app:
                async with leg(app, ids, HOW, local_prefill=True) as (call, _):
                    await call.until("ready")
                root = hashing.root_hash(app.description.layout, "")
                hashes = hashing.block_hashes(root, ids, 16)
                async with asyncio.timeout(5):
                    while (await index.lookup(hashes)).depths.get("m1") != 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            assert not (await index.lookup(hashes)).depths


async def test_a_stage_starts_and_serves_without_its_redis() -> None:
    async with stage(Role.MAIN, redis_url="redis://127.0.0.1:1/0") as app:
        async with leg(app, prompt(20), HOW, local_prefill=True) as (call, _):
            await call.resume()
            await call.until("finished")


async def test_a_stage_behind_the_wan_is_reached_through_it() -> None:
    async with wan_emulator(WanSettings(listen="127.0.0.1:0")) as wan:
        async with stage(Role.MAIN, site="b", advertise_via=wan.admin_address) as md, stage(Role.PREFILL) as p:
            assert md.description.address != md.address
            ids = prompt(40)
            async with leg(md, ids, HOW) as (call, t), prefill(p, ids, HOW, [target(md, t)]) as filling:
                await call.resume((await filling.until("first_token")).ids)
                await call.until("finished")
                await filling.rest()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model=/no/such/model"], "/no/such/model"),
        (["--model=tiny", "--listen=LISTEN"], "cannot listen on"),
    ],
)
async def test_a_start_that_fails_says_why_in_one_line_and_exits_with_2(
    app: StageApp, flags: list[str], says: str
) -> None:
    flags = [flag.replace("LISTEN", app.address) for flag in flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.main_decode", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    last = errors.decode().strip().splitlines()[-1]
    assert says in last and last.startswith("services.main_decode:")
    assert "Traceback" not in errors.decode()


async def test_a_stage_program_serves_and_stops_on_sigterm() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.relay_decode",
        "--model=tiny",
        "--pool-tokens=1024",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    seen = []
    while "advertised as" not in (line := (await process.stderr.readline()).decode()):
        seen.append(line)
    assert any("pool: 64 blocks of 16 tokens = 1024 tokens" in line for line in seen)
    assert any("pool_tokens=1024" in line for line in seen)
    process.terminate()
    _, rest = await process.communicate()
    assert process.returncode == 0
    assert b"stopped" in rest
