"""One request's life, in order. Each step has a room: input, prefixes, policies, feeding, handoff, client, drain."""

from kvrelay.proto.v1 import router_pb2
from kvrelay.telemetry.logging import bind_request_id
from kvrelay.types import FinishReason
from services.router.client import ClientStream, Write
from services.router.conductor import Conductor
from services.router.performing import RouteBroke
from services.router.report import Record
from services.router.rooms import Rooms
from services.router.run import Run


async def serve(rooms: Rooms, request: router_pb2.GenerateRequest, write: Write) -> FinishReason:
    """From the client's message to its last one. Raises the KvrelayError that the client shall see.

    Whatever happens, every leg is closed on the way out, except those that the drain group has taken over.
    """
    record = Record()
    async with rooms.admission:
        ask = await rooms.reader.read(request, rooms.served())  # prompt ids, a seed, limits
        bind_request_id(ask.request_id)
        question = await rooms.question(ask)  # what each cache holds of it
        async with Run(rooms, ask, record, question) as run:
            client = ClientStream(write, run.answer, rooms.settings.client_backlog_tokens)
            conductor = await answered(run, client)
            completed = run.completed(conductor)
            await run.hand_over(conductor)  # the client's end is not main decode's end
            await client.complete(completed)
            await run.settle()
            return run.reason


async def answered(run: Run, client: ClientStream) -> Conductor:
    """Attempts until the answer is complete; the legs of the last one are still open."""
    while True:
        conductor = run.plan(client)  # main decode first, then prefill, then the pipeline
        try:
            conductor.open()  # all legs at once, waiting for none
            await conductor.until_answered()  # first token, relay, hand-off, main decode
            return conductor
        except RouteBroke as broke:  # before the first token: plan again without whoever failed
            await run.broke(broke)
