"""The relay as its callers and targets see it: mapping, ends and resets of connections, back-pressure, outages."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.wan.emulator import Outage, WanEmulator
from kvrelay.wan.settings import WanSettings
from tests.unit.wan.plumbing import Target, a_target, dial, dialled, echo, flood, quiet, relaying, until


@asynccontextmanager
async def relayed(settings: WanSettings | None = None) -> AsyncIterator[tuple[WanEmulator, Target, str]]:
    """An emulator, a target at site B, and the address by which site A reaches it."""
    async with a_target() as target, relaying(settings or WanSettings()) as emulator:
        yield emulator, target, await emulator.map_target(target.address, "b")
        await quiet(emulator)


async def test_the_same_target_gets_the_same_port_and_another_site_another() -> None:
    async with relaying(WanSettings()) as emulator:
        first = await emulator.map_target("127.0.0.1:9", "b")
        assert await emulator.map_target("127.0.0.1:9", "b") == first
        assert await emulator.map_target("127.0.0.1:9", "a") != first
        assert await emulator.map_target("127.0.0.1:10", "b") != first


@pytest.mark.parametrize(
    ("target", "site", "field"),
    [("nowhere", "b", "target"), ("x:0", "b", "target"), ("x:99999", "a", "target"), ("x:1", "c", "target_site")],
)
async def test_a_bad_mapping_is_refused_by_name(target: str, site: str, field: str) -> None:
    async with relaying(WanSettings()) as emulator:
        with pytest.raises(InvalidRequest) as refusal:
            await emulator.map_target(target, site)
        assert refusal.value.field == field


@pytest.fixture
def two_ports() -> Iterator[str]:
    """A range of two ports that are free now."""
    for _ in range(50):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        yield f"{port}-{port + 1}"
        return
    pytest.skip("no two free ports side by side")


async def test_ports_are_taken_in_order_and_advertised_to_the_other_site(two_ports: str) -> None:
    first = int(two_ports.split("-")[0])
    settings = WanSettings(ports=two_ports, advertise_host_a="wan-a", advertise_host_b="wan-b", map=["redis:6379@a"])
    async with relaying(settings) as emulator:
        assert emulator.mappings == {"redis:6379": f"wan-b:{first}"}  # callers of a target at A are at B
        assert await emulator.map_target("main:1", "b") == f"wan-a:{first + 1}"
        with pytest.raises(Overloaded, match=two_ports):
            await emulator.map_target("main:2", "b")


async def test_bytes_pass_both_ways_unchanged() -> None:
    async with relayed(WanSettings(rate="50MB", delay_ms=1)) as (_, target, address):
        target.said = bytes(range(256)) * 2000
        async with dialled(address) as (reader, writer):
            await flood(writer, 700_000)
            writer.write_eof()
            assert await reader.read(-1) == target.said
        assert target.received == [700_000]
        assert target.ended == ["eof"]


async def test_a_callers_reset_reaches_the_target() -> None:
    async with relayed() as (_, target, address):
        reader, writer = await dial(address)
        await echo((reader, writer))
        sock = writer.get_extra_info("socket")
        with socket.socket(fileno=socket.dup(sock.fileno())) as twin:
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()
        await until(lambda: target.ended)
        assert target.ended == ["reset"]


async def test_a_target_that_is_not_there_costs_a_round_trip_and_a_reset() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with relaying(WanSettings(delay_ms=30)) as emulator:
            loop = asyncio.get_running_loop()
            began = loop.time()
            reader, writer = await dial(await emulator.map_target(address, "b"))
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            assert loop.time() - began >= 0.059
            writer.close()
            await quiet(emulator)


async def test_a_target_that_does_not_read_holds_its_caller_back() -> None:
    async with relayed(WanSettings(rate="200MB")) as (emulator, target, address):
        target.reading.clear()
        async with dialled(address) as (_, writer):
            flooding = asyncio.create_task(flood(writer))
            last = -1
            while last != emulator.a_to_b.bytes:  # until nothing moves any more
                last = emulator.a_to_b.bytes
                await asyncio.sleep(0.1)
            assert last < 64 * 1024 * 1024
            assert emulator.a_to_b.backlog_bytes <= 256 * 1024
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
        target.reading.set()


async def test_refuse_refuses_new_connections_and_keeps_open_ones() -> None:
    async with relayed() as (emulator, _, address):
        async with dialled(address) as streams:
            await echo(streams)
            await emulator.set_outage(Outage.REFUSE)
            await echo(streams)
            with pytest.raises(ConnectionRefusedError):
                await dial(address)
            mapped_meanwhile = await emulator.map_target("127.0.0.1:9", "b")
            with pytest.raises(ConnectionRefusedError):
                await dial(mapped_meanwhile)
            await emulator.set_outage(Outage.NONE)
            async with dialled(address) as others:
                await echo(others)


async def test_stall_holds_bytes_and_new_connections_until_it_is_over() -> None:
    async with relayed() as (emulator, _, address), AsyncExitStack() as stack:
        streams = await stack.enter_async_context(dialled(address))
        await echo(streams)
        await emulator.set_outage(Outage.STALL)
        others = await stack.enter_async_context(dialled(address))
        waiting = [asyncio.create_task(echo(each)) for each in (streams, others)]
        await asyncio.sleep(0.15)
        assert not any(task.done() for task in waiting)
        await emulator.set_outage(Outage.NONE)
        assert all(seconds > 0.1 for seconds in await asyncio.gather(*waiting))


async def test_reset_resets_open_connections_and_those_still_opening() -> None:
    async with relayed(WanSettings(delay_ms=20)) as (emulator, target, address):
        open_one = await dial(address)
        await echo(open_one)
        opening = await dial(address)
        await asyncio.sleep(0.005)
        await emulator.set_outage(Outage.RESET)
        for reader, writer in (open_one, opening):
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await dial(address)
        await quiet(emulator)
        await emulator.set_outage(Outage.NONE)
        async with dialled(address) as streams:
            await echo(streams)
        assert "reset" in target.ended


async def test_closing_the_emulator_ends_every_connection_and_frees_its_ports() -> None:
    async with a_target() as target:
        async with relaying(WanSettings()) as emulator:
            address = await emulator.map_target(target.address, "b")
            reader, writer = await dial(address)
            await echo((reader, writer))
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await dial(address)
