"""The router's connection to one address: dial, Describe, keep WatchLoad open, dial again. Knows no other stage."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvrelay.errors import KvrelayError, StageFailed
from kvrelay.proto.v1 import decode_pb2_grpc, prefill_pb2_grpc, stage_pb2, stage_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel
from kvrelay.rpc.convert import description_from_proto, load_from_proto
from kvrelay.rpc.status import from_rpc_error
from kvrelay.types import StageDescription, StageLoad
from services.router.legs import OpenDecode, OpenPrefill
from services.router.route import StageView

log = logging.getLogger(__name__)


_SILENT_VIEW_S = 0.05
"""How often the view of a silent stage is made anew: it says for how long it has been."""
_UNREPORTED_S = 0.25
"""A push asked for is in the sender's reports after so long: its Offer has crossed and come back."""


@dataclass(frozen=True, slots=True)
class DialSettings:
    """See RouterSettings."""

    timeout_s: float = 5.0
    redial_min_s: float = 0.2
    redial_max_s: float = 5.0
    load_silence_s: float = 5.0


class StageLink:
    """One address. `admit` says why a stage may not serve (None: it may); `changed` is called on every change."""

    def __init__(
        self,
        address: str,
        settings: DialSettings,
        admit: Callable[["StageLink", StageDescription], str | None],
        changed: Callable[["StageLink"], None],
    ) -> None:
        self.address = address
        self._tokens = open_channel(address, Purpose.TOKENS)
        self.open_decode: OpenDecode = decode_pb2_grpc.DecodeServiceStub(self._tokens).Decode
        self.open_prefill: OpenPrefill = prefill_pb2_grpc.PrefillServiceStub(self._tokens).Prefill
        self.description: StageDescription | None = None
        """As last told; it may be refused or gone, see `why_not`."""
        self.live = False
        """Accepted, and its load stream is open."""
        self._report: stage_pb2.LoadReport | None = None
        self._load: StageLoad | None = None
        """Of `_report`, once it was asked for."""
        self._load_at = 0.0
        self._joins = 0
        self._sent_requests = 0
        self._sent_tokens = 0
        self._sent_crossings: deque[tuple[float, str, int]] = deque()
        """(when, receiver, bytes), for _UNREPORTED_S."""
        self._why_not = "not reached yet"
        self._view: StageView | None = None
        self._view_until = 0.0
        """The view becomes another one then, whatever happens: a push is reported by now, or the stage is silent."""
        self._settings = settings
        self._admit = admit
        self._changed = changed

    async def run(self) -> None:
        """Serves until cancelled."""
        pause = self._settings.redial_min_s
        try:
            async with open_channel(self.address, Purpose.CONTROL) as channel:
                while True:
                    if await self._session(channel):
                        pause = self._settings.redial_min_s
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, self._settings.redial_max_s)
        finally:
            await self._tokens.close()

    @property
    def load(self) -> StageLoad | None:
        """Its last report; None: there is none, or it is out of reach. Most reports are never looked at."""
        if self._load is None and self._report is not None:
            self._load = load_from_proto(self._report)
        return self._load

    def view(self, now: float) -> StageView | None:
        """None: it has never said who it is. The same object until something changes."""
        if self.description is None:
            return None
        if self._view is None or now >= self._view_until:
            self._view = self._look(self.description, now)
        return self._view

    def _look(self, description: StageDescription, now: float) -> StageView:
        crossings = self._sent_crossings
        while crossings and crossings[0][0] <= now - _UNREPORTED_S:
            crossings.popleft()
        silent_at = self._load_at + self._settings.load_silence_s
        self._view_until = silent_at if silent_at > now else now + _SILENT_VIEW_S
        if crossings:
            self._view_until = min(self._view_until, crossings[0][0] + _UNREPORTED_S)
        return StageView(
            description,
            self.load,
            self._load_at,
            self._sent_requests,
            self._sent_tokens,
            tuple((peer, size) for _, peer, size in crossings),
            self.why_not(now),
            self._joins,
        )

    def load_age_s(self, now: float) -> float:
        """Since the last report."""
        return now - self._load_at if self._report is not None else 0.0

    def why_not(self, now: float) -> str:
        """Why the stage must not be chosen; empty: usable."""
        if not self.live:
            return self._why_not
        if self._report is not None and self._report.draining:
            return "draining"
        age = self.load_age_s(now)
        return f"silent for {age:.1f} s" if age > self._settings.load_silence_s else ""

    def sent(self, tokens: int) -> None:
        """A request was sent there; counts as load until the next report."""
        self._sent_requests += 1
        self._sent_tokens += tokens
        self._view = None

    def crosses(self, receiver: str, size: int) -> None:
        """It is to push so many bytes to the receiver."""
        if size:
            self._sent_crossings.append((time.monotonic(), receiver, size))
            self._view = None

    async def _session(self, channel: grpc.aio.Channel) -> bool:
        """One connection's life; -> whether the stage was accepted."""
        stub = stage_pb2_grpc.StageServiceStub(channel)
        accepted = False
        try:
            info = await stub.Describe(stage_pb2.DescribeRequest(), timeout=self._settings.timeout_s)
            self.description = description_from_proto(info)
            self._view = None
            refusal = self._admit(self, self.description)
            if refusal is not None:
                self._unusable(f"refused: {refusal}")
                return False
            accepted = True
            await self._watch(stub)
            self._unusable("its load stream ended")
        except grpc.aio.AioRpcError as error:
            self._unusable(f"not reached: {from_rpc_error(error, self.address)}")
        except KvrelayError as error:
            self._unusable(f"refused: {error}")
        return accepted

    async def _watch(self, stub: "stage_pb2_grpc.StageServiceAsyncStub") -> None:
        assert self.description is not None
        call = stub.WatchLoad(stage_pb2.WatchLoadRequest())
        try:
            async for report in call:
                was_draining = self._report is not None and self._report.draining
                self._report, self._load, self._load_at = report, None, time.monotonic()
                self._sent_requests = self._sent_tokens = 0
                self._view = None
                if not self.live:
                    self.live = True
                    self._joins += 1
                    log.info("stage %s at %s joined", self.description.instance_id, self.address)
                    self._changed(self)
                elif report.draining != was_draining:
                    log.info("stage %s: draining=%s", self.description.instance_id, not was_draining)
                    self._changed(self)
        finally:
            call.cancel()
            if self.live:
                self.live, self._report, self._load = False, None, None
                self._why_not = "its load stream ended"
                self._view = None
                log.info("stage %s at %s left", self.description.instance_id, self.address)
                self._changed(self)

    def _unusable(self, why: str) -> None:
        if why != self._why_not:
            log.warning("stage at %s is not usable: %s", self.address, why)
            self._why_not = why
            self._view = None
            self._changed(self)


def gone(address: str) -> StageFailed:
    """The stage that a leg was to be opened at has left meanwhile."""
    return StageFailed(f"{address} has left the fleet")
