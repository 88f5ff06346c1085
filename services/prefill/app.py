"""The wiring of a prefill stage."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.proto.v1 import prefill_pb2_grpc
from kvrelay.stage.app import StageApp, Wiring, serving
from kvrelay.stage.core import stage_core
from kvrelay.transfer.bulk_carrier import BulkCarriers
from kvrelay.transfer.sender import KvSender
from kvrelay.types import Role
from services.prefill.config import PrefillSettings
from services.prefill.servicer import SERVICE, PrefillService


@asynccontextmanager
async def prefill_app(settings: PrefillSettings) -> AsyncIterator[StageApp]:
    """A prefill stage that serves until the body ends.

    KvrelayError, OSError, ValueError: it cannot start; the text says why.
    """
    async with stage_core(settings, Role.PREFILL) as core:
        carriers = BulkCarriers(lambda reason: core.metrics.fallbacks.labels(f"bulk_{reason}").inc())
        sender = KvSender(
            core.pool,
            core.description.layout,
            connections=settings.push_connections,
            resume_wait_s=settings.push_patience_s,
            carrier=carriers,
        )
        async with sender:
            prefills = PrefillService(core, sender)
            wiring = Wiring(
                services={
                    SERVICE: lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefills, server)
                },
                leftovers=[sender.leftovers],
                links=sender.links,
                counters={
                    "transfer_resumes": lambda: sender.stats.resumes,
                    "bulk_lanes": lambda: carriers.bulk_lanes,
                    "grpc_lanes": lambda: carriers.grpc_lanes,
                },
            )
            async with serving(core, wiring) as app:
                yield app
