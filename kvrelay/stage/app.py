"""The wiring of a stage: builds and owns everything in dependency order, and takes it down in the reverse order."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc

from kvrelay.proto.v1 import decode_pb2_grpc, stage_pb2_grpc
from kvrelay.rpc.server import GrpcServer, grpc_server
from kvrelay.settings import StageSettings
from kvrelay.stage import decode, service
from kvrelay.stage.address import advertised_address, advertised_bulk_address
from kvrelay.stage.announce import announced
from kvrelay.stage.core import StageCore, stage_core
from kvrelay.stage.decode import DecodeService
from kvrelay.stage.load import LoadMeter
from kvrelay.stage.service import StageService
from kvrelay.telemetry.serve import serve_metrics
from kvrelay.transfer import servicer as transfer
from kvrelay.transfer.bulk_server import BulkServer, bulk_server
from kvrelay.transfer.receiver import KvReceiver
from kvrelay.transfer.servicer import KvTransferServicer
from kvrelay.types import LinkLoad, Role, StageDescription

log = logging.getLogger(__name__)

_LAST_WORDS_S = 0.5
"""What the server itself still waits for calls that are not requests (health, reflection)."""

_SETTLE_GAP_S = 0.005


@dataclass(frozen=True, slots=True)
class Wiring:
    """What differs between stages."""

    services: Mapping[str, Callable[[grpc.aio.Server], None]]
    """Full name of each service -> what adds it to a server."""
    leftovers: Sequence[Callable[[], Mapping[str, int]]]
    links: Callable[[], Sequence[LinkLoad]] = field(default=tuple)
    counters: Mapping[str, Callable[[], float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageApp:
    """A stage that serves."""

    address: str
    """host:port as bound."""
    metrics_address: str
    """Empty: no endpoint."""
    description: StageDescription
    """With the advertised address."""
    core: StageCore
    _wiring: Wiring

    @property
    def failed(self) -> "asyncio.Future[BaseException]":
        """Gets the error when the stage can serve no more."""
        return self.core.driver.failed

    def leftovers(self) -> dict[str, int]:
        """Everything still held for requests, by kind; {} when idle."""
        return _leftovers(self.core, self._wiring)

    async def settle(self, within_s: float = 2.0) -> None:
        """Waits until everything is released, then checks the pool. AssertionError says what is left or broken."""
        for _ in range(int(within_s / _SETTLE_GAP_S)):  # held in several places, of which none knows the others
            if not self.leftovers():
                break
            await asyncio.sleep(_SETTLE_GAP_S)
        else:
            raise AssertionError(f"{self.description.instance_id} still holds {self.leftovers()}")
        await self.core.driver.check_idle()


@asynccontextmanager
async def decode_app(settings: StageSettings, role: Role) -> AsyncIterator[StageApp]:
    """A relay or main decode stage that serves until the body ends.

    KvrelayError, OSError, ValueError: it cannot start; the text says why.
    """
    async with stage_core(settings, role) as core, _bulk_doors(settings) as doors:
        receiver = KvReceiver(
            core.pool,
            core.description.layout,
            epoch=core.description.epoch,
            offer_wait_s=settings.offer_wait_s,
            doors=doors,
        )
        legs = DecodeService(core, receiver)
        pushes = KvTransferServicer(receiver)
        wiring = Wiring(
            services={
                decode.SERVICE: lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(legs, server),
                transfer.SERVICE: lambda server: transfer.add_to_server(pushes, server),
            },
            leftovers=[receiver.leftovers, *([doors.leftovers] if doors is not None else [])],
            counters={
                "received_bytes": lambda: receiver.stats.payload_bytes,
                "late_frames": lambda: receiver.stats.frames_late,
                "crc_errors": lambda: receiver.stats.crc_errors,
                "offers_parked": lambda: receiver.stats.offers_parked,
            },
        )
        async with serving(core, wiring) as app:
            yield app


@asynccontextmanager
async def _bulk_doors(settings: StageSettings) -> AsyncIterator[BulkServer | None]:
    """The way in for bulk KV connections, if there is to be one. OSError, ValueError, StageFailed: it cannot be had."""
    if not settings.bulk_listen:
        yield None
        return
    async with bulk_server(settings.bulk_listen) as doors:
        doors.advertised = await advertised_bulk_address(settings, doors.address)
        log.info("bulk KV connections at %s, advertised as %s", doors.address, doors.advertised)
        yield doors


@asynccontextmanager
async def serving(core: StageCore, wiring: Wiring) -> AsyncIterator[StageApp]:
    """Serves a stage's own services and StageService until the body ends."""
    settings = core.settings
    meter = LoadMeter(core.driver, core.intake, wiring.links)
    stage = StageService(core, meter)
    services = {
        service.SERVICE: lambda server: stage_pb2_grpc.add_StageServiceServicer_to_server(stage, server),
        **wiring.services,
    }

    def register(server: grpc.aio.Server) -> None:
        for add in services.values():
            add(server)

    _measure(core, wiring, meter)
    async with (
        serve_metrics(core.metrics.registry, settings.metrics_listen) as metrics_address,
        grpc_server(settings.listen, register, list(services), ready=False, grace_s=_LAST_WORDS_S) as server,
    ):
        description = replace(core.description, address=await advertised_address(settings, server.address))
        try:
            async with announced(core, description) as announcer:
                meter.index_connected = lambda: announcer.connected
                core.metrics.count_from("index_changes", lambda: announcer.changes)
                core.metrics.count_from("index_announcements", lambda: announcer.announcements)
                stage.begin(description)
                await server.health.serving()
                watching = asyncio.create_task(_until_failed(core, server), name="engine watch")
                try:
                    yield StageApp(server.address, metrics_address, description, core, wiring)
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                    await _stop_taking_requests(core, server)
        finally:
            stage.end()


async def _until_failed(core: StageCore, server: GrpcServer) -> None:
    """An engine that has died serves nobody: says so at once, whatever the program does about it."""
    await asyncio.wait([core.driver.failed])
    core.intake.shut()
    await server.health.not_serving()


async def _stop_taking_requests(core: StageCore, server: GrpcServer) -> None:
    # 1. Readiness off: health watchers and the router's load reports say so.
    await server.health.not_serving()
    # 2. Stop intake.
    core.intake.shut()
    # 3. Running requests may end.
    try:
        async with asyncio.timeout(core.settings.shutdown_grace_s):
            await core.intake.empty()
    except TimeoutError:
        # 4. The rest is cancelled when the server closes, after the cache has been taken from the index.
        log.warning("cancelling %d requests", core.intake.leftovers()["leases"])


def _measure(core: StageCore, wiring: Wiring, meter: LoadMeter) -> None:
    metrics, description = core.metrics, core.description
    metrics.load_from(meter)
    metrics.leases_from(core.intake.states)
    metrics.leftovers(lambda: _leftovers(core, wiring))
    metrics.count_from("preemptions", lambda: core.driver.load().preemptions)
    for name, read in wiring.counters.items():
        metrics.count_from(name, read)
    metrics.describe(
        instance_id=description.instance_id,
        role=description.role,
        site=description.site,
        model=description.model,
        pace=description.pace,
    )


def _leftovers(core: StageCore, wiring: Wiring) -> dict[str, int]:
    held = Counter({"sequences": core.driver.load().open})
    for read in (core.intake.leftovers, *wiring.leftovers):
        held.update(read())
    return {kind: count for kind, count in held.items() if count}
