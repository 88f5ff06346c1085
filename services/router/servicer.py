"""RouterService at the edge: protos in, protos out, every end counted. Knows no stage."""

import asyncio
import time
from typing import Any

import grpc

from kvrelay.proto.v1 import router_pb2, router_pb2_grpc
from kvrelay.rpc.convert import description_to_proto, load_to_proto
from kvrelay.rpc.guard import client_error
from kvrelay.rpc.status import row_of
from kvrelay.telemetry.totals import totals
from services.router import pipeline
from services.router.report import route_to_proto
from services.router.rooms import Rooms

_CANCELLED_WITHIN_S = 1.0


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The public service."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    async def Generate(  # type: ignore[override]  # a coroutine that writes: cancelled where it waits, never in a yield
        self, request: router_pb2.GenerateRequest, context: Any
    ) -> None:
        """See router.proto."""
        outcomes = self._rooms.metrics.outcomes
        try:
            try:
                reason = await pipeline.serve(self._rooms, request, context.write)
            except grpc.aio.InternalError:
                # The client has gone. gRPC says so by cancelling the handler, and has not come to that yet: the request
                # ends as cancelled, not as an error of ours.
                await asyncio.sleep(_CANCELLED_WITHIN_S)
                raise
        except asyncio.CancelledError:
            outcomes.labels("CANCELLED").inc()
            raise
        except Exception as exc:
            error = client_error(exc)
            outcomes.labels("INTERNAL" if error is None else row_of(error).code.name).inc()
            if error is None or error is exc:
                raise
            raise error from exc
        outcomes.labels(reason).inc()

    async def Plan(self, request: router_pb2.GenerateRequest, context: Any) -> router_pb2.PlanReply:
        """See router.proto."""
        rooms = self._rooms
        ask = await rooms.reader.read(request, rooms.served())
        route = rooms.policy.choose(await rooms.question(ask), rooms.limits)
        return router_pb2.PlanReply(route=route_to_proto(route), considered=route.considered)

    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Any) -> router_pb2.TokenizeReply:
        """See router.proto."""
        return router_pb2.TokenizeReply(ids=await self._rooms.reader.tokenize(request))

    async def GetFleet(self, request: router_pb2.GetFleetRequest, context: Any) -> router_pb2.Fleet:
        """See router.proto."""
        rooms = self._rooms
        fleet = router_pb2.Fleet(
            index_connected=rooms.prefixes.connected,
            requests=rooms.tally.requests,
            fallbacks=rooms.tally.fallbacks,
            in_flight=rooms.admission.in_flight,
            policy=rooms.policy.name,
            totals=totals(rooms.metrics.registry),
        )
        now = time.monotonic()
        for view in rooms.fleet.views():
            stage = fleet.stages.add(
                info=description_to_proto(view.description),
                load_age_ms=1e3 * (now - view.load_at) if view.load is not None else 0.0,
                usable=not view.why_not,
                why_not=view.why_not,
            )
            if view.load is not None:
                stage.load.CopyFrom(load_to_proto(view.load))
        for address, why in sorted(rooms.fleet.unreached().items()):
            stage = fleet.stages.add(usable=False, why_not=why)
            stage.info.address = address
        return fleet
