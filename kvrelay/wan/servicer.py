"""The emulator's admin service. Translates; decides nothing."""

import math
from typing import Any

from kvrelay.errors import InvalidRequest
from kvrelay.proto.v1 import wan_pb2, wan_pb2_grpc
from kvrelay.wan.direction import Direction
from kvrelay.wan.emulator import Outage, WanEmulator

SERVICE = "kvrelay.proto.v1.WanService"

_OUTAGES = {
    Outage.NONE: wan_pb2.OUTAGE_NONE,
    Outage.REFUSE: wan_pb2.OUTAGE_REFUSE,
    Outage.STALL: wan_pb2.OUTAGE_STALL,
    Outage.RESET: wan_pb2.OUTAGE_RESET,
}
_FROM_OUTAGE = {value: outage for outage, value in _OUTAGES.items()}

_LONGEST_MS = 60_000.0
_FIELDS = {
    # field of the message -> (field of Shape, what one unit is there)
    "rate_bytes_per_s": ("rate", 1.0),
    "delay_ms": ("delay_s", 0.001),
    "jitter_ms": ("jitter_s", 0.001),
    "connection_rate_bytes_per_s": ("connection_rate", 1.0),
}


class WanServicer(wan_pb2_grpc.WanServiceServicer):
    """WanService over an emulator. Raises KvrelayErrors: the server's guard turns them into status."""

    def __init__(self, emulator: WanEmulator) -> None:
        self._emulator = emulator

    async def MapTarget(self, request: wan_pb2.MapTargetRequest, context: Any) -> wan_pb2.MapTargetReply:
        """A port for a target."""
        return wan_pb2.MapTargetReply(address=await self._emulator.map_target(request.target, request.target_site))

    async def SetLink(self, request: wan_pb2.SetLinkRequest, context: Any) -> wan_pb2.LinkState:
        """All or nothing: a bad field changes nothing."""
        forth, back = _changes("a_to_b", request.a_to_b), _changes("b_to_a", request.b_to_a)
        if request.outage not in (*_FROM_OUTAGE, wan_pb2.OUTAGE_UNSPECIFIED):
            raise InvalidRequest("outage", f"unknown value {request.outage}")
        self._emulator.a_to_b.reshape(**forth)
        self._emulator.b_to_a.reshape(**back)
        if request.outage in _FROM_OUTAGE:
            await self._emulator.set_outage(_FROM_OUTAGE[request.outage])
        return self._state()

    async def GetLink(self, request: wan_pb2.GetLinkRequest, context: Any) -> wan_pb2.LinkState:
        """The link as it is."""
        return self._state()

    def _state(self) -> wan_pb2.LinkState:
        emulator = self._emulator
        return wan_pb2.LinkState(
            a_to_b=_shape(emulator.a_to_b),
            b_to_a=_shape(emulator.b_to_a),
            outage=_OUTAGES[emulator.outage],
            a_to_b_stats=_stats(emulator.a_to_b),
            b_to_a_stats=_stats(emulator.b_to_a),
            connections=emulator.connections,
            mappings=emulator.mappings,
            cpu_s=emulator.cpu_s,
            up_s=emulator.up_s,
        )


def _changes(name: str, message: wan_pb2.Direction) -> dict[str, float]:
    changes: dict[str, float] = {}
    for field, (key, unit) in _FIELDS.items():
        if not message.HasField(field):  # type: ignore[arg-type]
            continue
        value = getattr(message, field)
        if not math.isfinite(value) or value < 0 or (field.endswith("_ms") and value > _LONGEST_MS):
            limit = f"0-{_LONGEST_MS:.0f}" if field.endswith("_ms") else ">= 0"
            raise InvalidRequest(f"{name}.{field}", f"must be {limit}, got {value}")
        changes[key] = value * unit
    return changes


def _shape(direction: Direction) -> wan_pb2.Direction:
    return wan_pb2.Direction(**{field: getattr(direction.shape, key) / unit for field, (key, unit) in _FIELDS.items()})


def _stats(direction: Direction) -> wan_pb2.DirectionStats:
    return wan_pb2.DirectionStats(bytes=direction.bytes, backlog_bytes=direction.backlog_bytes, busy_s=direction.busy_s)
