"""PrefillService: one call = one prompt computed, index 0 sampled, its KV pushed. Knows no decode leg."""

from typing import Any

from kvrelay.engine.sequence import SequenceSpec
from kvrelay.errors import InvalidRequest
from kvrelay.proto.v1 import prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc import convert
from kvrelay.rpc.address import split_address
from kvrelay.stage.core import StageCore
from kvrelay.stage.opening import check_epoch
from kvrelay.transfer.sender import KvSender
from kvrelay.types import KvTarget, Sampling
from services.prefill.serving import ServedPrefill

SERVICE = "kvrelay.proto.v1.PrefillService"

_UNUSED = Sampling(seed=0, max_tokens=1)
"""With kv_only nothing is sampled."""


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """An open stream is a reservation: the prompt's blocks are held until every push has ended or the stream has."""

    def __init__(self, core: StageCore, sender: KvSender) -> None:
        self._core = core
        self._sender = sender

    async def Prefill(  # type: ignore[override]  # a coroutine that writes: the stub knows generators only
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> None:
        """Part of PrefillService. A coroutine, not a generator: it must learn at once that its client has left."""
        with self._core.lease(request.request_id) as lease:
            check_epoch(self._core.description, request.epoch)
            targets = _targets(request)
            prefill = ServedPrefill(self._core, self._sender, lease, _spec(request, lease.sequence_id), targets)
            try:
                await prefill.run(context.write)
            finally:
                await self._core.intake.release(prefill.release())


def _spec(request: prefill_pb2.PrefillRequest, sequence_id: str) -> SequenceSpec:
    unused = request.kv_only and not request.HasField("sampling")
    return SequenceSpec(
        sequence_id=sequence_id,
        prompt_ids=list(request.prompt_ids),
        sampling=_UNUSED if unused else convert.sampling_from_proto(request.sampling),
        salt=request.cache_salt,
        sample=not request.kv_only,
        output_budget=1,
    )


def _targets(request: prefill_pb2.PrefillRequest) -> list[KvTarget]:
    targets = []
    for at, message in enumerate(request.targets):
        target = convert.kv_target_from_proto(message, f"targets[{at}]")
        try:
            split_address(target.address, f"targets[{at}].address")
        except ValueError as error:
            raise InvalidRequest(f"targets[{at}].address", f"must be host:port, got {target.address!r}") from error
        targets.append(target)
    return targets
