"""DecodeService, once for relay and main: joins a leg's messages, its engine events and its KV. leg.py decides."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from kvrelay.engine.sequence import SequenceSpec
from kvrelay.errors import InvalidRequest, ProtocolViolation
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc
from kvrelay.rpc import convert
from kvrelay.stage.core import StageCore
from kvrelay.stage.inbox import Inbox
from kvrelay.stage.opening import check_epoch, check_hashes
from kvrelay.stage.serving import Item, ServedLeg
from kvrelay.transfer.receiver import KvReceiver

SERVICE = "kvrelay.proto.v1.DecodeService"

LAST_MESSAGES_S = 0.5
"""How long an ended leg's stream, which holds nothing any more, still takes messages, unless the router ends it first.

A message written to a stream that its server has ended breaks that stream for the writer: a Stop that crosses with
Finished would turn OK into INTERNAL, and could cost the router the Finished.
"""

EXTEND_RESERVE_TOKENS = 64
"""Room that a leg without an output budget reserves beyond its prompt: one extend."""


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """An open stream is a reservation. However it ends, what it held is released within an engine step + 1 s."""

    def __init__(self, core: StageCore, receiver: KvReceiver) -> None:
        self._core = core
        self._receiver = receiver
        self._transfer_ids: set[str] = set()

    async def Decode(  # type: ignore[override]  # a coroutine that writes: the stub knows generators only
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> None:
        """Part of DecodeService.

        A coroutine, not a generator: gRPC cancels it wherever it waits when the client cancels or its connection dies.
        A generator that waits in `yield` would learn of that only when it is collected.
        """
        messages = aiter(request_iterator)
        first = await _first(messages)
        async with Inbox[Item]() as inbox:
            reading = inbox.read(messages)
            await self._serve(first, inbox, context)
            await inbox.discard(reading, LAST_MESSAGES_S)

    async def _serve(self, first: decode_pb2.OpenLeg, inbox: Inbox[Item], context: Any) -> None:
        with self._core.lease(first.request_id) as lease, self._own(first.transfer_id):
            spec = await self._spec(first, lease.sequence_id)
            leg = ServedLeg(self._core, self._receiver, lease, first.transfer_id, spec, inbox, context.write)
            try:
                await leg.run()
            finally:
                await self._core.intake.release(leg.release())

    async def _spec(self, first: decode_pb2.OpenLeg, sequence_id: str) -> SequenceSpec:
        check_epoch(self._core.description, first.epoch)
        if bool(first.transfer_id) == first.local_prefill:
            raise InvalidRequest("transfer_id", "must be given, or local_prefill, and not both")
        prompt_ids = list(first.prompt_ids)
        await asyncio.to_thread(
            check_hashes, self._core.description, first.cache_salt, prompt_ids, list(first.block_hashes)
        )
        sampling = convert.sampling_from_proto(first.sampling)
        return SequenceSpec(
            sequence_id=sequence_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            salt=first.cache_salt,
            await_kv=not first.local_prefill,
            held=True,
            output_budget=first.output_budget if first.HasField("output_budget") else None,
            reserve_tokens=min(EXTEND_RESERVE_TOKENS, sampling.max_tokens),
        )

    @contextmanager
    def _own(self, transfer_id: str) -> Iterator[None]:
        """One leg a transfer: a second one could end the first one's."""
        if transfer_id in self._transfer_ids:
            raise ProtocolViolation(f"transfer_id: {transfer_id!r} belongs to another leg here")
        ids = {transfer_id} - {""}
        self._transfer_ids |= ids
        try:
            yield
        finally:
            self._transfer_ids -= ids


async def _first(messages: AsyncIterator[decode_pb2.DecodeRequest]) -> decode_pb2.OpenLeg:
    first = await anext(messages, None)
    kind = first.WhichOneof("message") if first is not None else None
    if first is None or kind != "open":
        raise ProtocolViolation(f"the first message of a leg must be open, got {kind or 'none'}")
    return first.open
