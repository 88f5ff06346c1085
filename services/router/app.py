"""The router's wiring: builds and owns everything, in order of dependency, and takes it down in reverse."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvrelay.index.memory import MemoryIndex
from kvrelay.index.redis import RedisIndex
from kvrelay.proto.v1 import router_pb2, router_pb2_grpc
from kvrelay.rpc.health import ServerHealth
from kvrelay.rpc.server import grpc_server
from kvrelay.telemetry.metrics import RouterMetrics
from kvrelay.telemetry.serve import serve_metrics
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.types import Role
from services.router.admission import Admission
from services.router.config import RouterSettings
from services.router.drain import DrainGroup
from services.router.fleet import Fleet, open_fleet
from services.router.input import Reader
from services.router.performing import Patience
from services.router.policies import policy
from services.router.prefixes import Prefixes
from services.router.registration import TokenizerFacts
from services.router.rooms import Rooms, Tally
from services.router.route import Limits
from services.router.servicer import RouterServicer
from services.router.stage_link import DialSettings
from services.router.tasks import OwnedTasks

log = logging.getLogger(__name__)

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


@dataclass(frozen=True, slots=True)
class RouterApp:
    """A router that serves."""

    address: str
    """host:port as bound."""
    metrics_address: str
    """host:port of the Prometheus text; empty: none."""
    fleet: Fleet
    rooms: Rooms

    def leftovers(self) -> dict[str, int]:
        """What is held for requests now, by kind; {} when idle."""
        return leftovers(self.rooms)


@asynccontextmanager
async def router_app(settings: RouterSettings) -> AsyncIterator[RouterApp]:
    """A router, until the body ends. ModelFileError: no such tokenizer. OSError: a port is in use."""
    async with AsyncExitStack() as stack:
        tokenizer = await asyncio.to_thread(load_tokenizer, settings.model)
        metrics = RouterMetrics()
        shared = None
        if settings.redis_url:
            timeout_s = settings.lookup_timeout_ms / 1e3
            index = RedisIndex(settings.redis_url, timeout_s=timeout_s, observe=metrics.index_lookup)
            shared = await stack.enter_async_context(index)
        memory = MemoryIndex(settings.remembered_blocks)
        fleet = await stack.enter_async_context(
            open_fleet(
                TokenizerFacts(tokenizer.identity, tokenizer.vocab_size),
                _dial(settings),
                settings.stages,
                shared.instances if shared is not None else None,
                settings.resolve_interval_s,
            )
        )
        fleet.on_restart(memory.forget)
        drains = DrainGroup(
            settings.max_draining, settings.drain_s, lambda outcome: metrics.drains.labels(outcome).inc()
        )
        stack.push_async_callback(drains.aclose)
        rooms = Rooms(
            settings=settings,
            tokenizer=tokenizer,
            fleet=fleet,
            prefixes=Prefixes(shared, memory),
            policy=policy(settings.policy),
            limits=_limits(settings),
            reader=Reader(tokenizer, long_chars=settings.long_prompt_chars, max_chars=settings.max_prompt_chars),
            admission=Admission(
                settings.max_in_flight,
                settings.max_queued,
                settings.retry_after_s,
                lambda: metrics.refused.labels("admission").inc(),
            ),
            drains=drains,
            metrics=metrics,
            tally=Tally({}, {}),
            patience=Patience(**{name: getattr(settings, name) for name in Patience.__slots__}),
        )
        metrics.in_flight.set_function(lambda: rooms.admission.in_flight)
        metrics.leftovers(lambda: leftovers(rooms))
        metrics.fleet_from(lambda: _fleet_counts(rooms.fleet))
        metrics_address = await stack.enter_async_context(serve_metrics(metrics.registry, settings.metrics_listen))
        server = await stack.enter_async_context(
            grpc_server(
                settings.listen,
                lambda server: router_pb2_grpc.add_RouterServiceServicer_to_server(RouterServicer(rooms), server),
                [SERVICE],
                ready=False,
                grace_s=settings.shutdown_grace_s,
            )
        )
        await stack.enter_async_context(_health_of(fleet, server.health))
        yield RouterApp(server.address, metrics_address, fleet, rooms)


def leftovers(rooms: Rooms) -> dict[str, int]:
    """What is held for requests now, by kind."""
    held = {
        "in_flight": rooms.admission.in_flight,
        "queued": rooms.admission.queued,
        "draining": len(rooms.drains),
        "legs": sum(map(len, rooms.open_legs)),
    }
    return {kind: count for kind, count in held.items() if count}


def missing_leg(fleet: Fleet) -> Role | None:
    """The leg that no stage serves, so that no request can be answered; None: all that must be there is there."""
    return next((role for role in (Role.MAIN, Role.PREFILL) if not fleet.serves(role)), None)


@asynccontextmanager
async def _health_of(fleet: Fleet, health: ServerHealth) -> AsyncIterator[None]:
    """Ready exactly while every leg that a request needs has a stage."""
    changed, tasks = asyncio.Event(), OwnedTasks()
    changed.set()

    async def follow() -> None:
        told: Role | str | None = "nothing yet"
        while True:
            await changed.wait()
            changed.clear()
            missing = missing_leg(fleet)
            if missing == told:
                continue
            told = missing
            if missing is None:
                await health.serving()
            else:
                log.warning("not ready: no usable stage for %s", missing)
                await health.not_serving()

    forget: Callable[[], None] = fleet.watch(changed.set)
    tasks.start(follow(), "health")
    try:
        yield
    finally:
        forget()
        await tasks.aclose()


def _fleet_counts(fleet: Fleet) -> dict[tuple[str, ...] | str, float]:
    counts: dict[tuple[str, ...] | str, float] = {}
    for view in fleet.views():
        key = (str(view.description.role), "no" if view.why_not else "yes")
        counts[key] = counts.get(key, 0) + 1
    return counts


def _dial(settings: RouterSettings) -> DialSettings:
    return DialSettings(
        timeout_s=settings.dial_timeout_s,
        redial_min_s=settings.redial_min_s,
        redial_max_s=settings.redial_max_s,
        load_silence_s=settings.load_silence_s,
    )


def _limits(settings: RouterSettings) -> Limits:
    return Limits(**{name: getattr(settings, name) for name in Limits.__slots__})
