"""`kvrelay generate`: streams one answer, then says how it was made."""

import json
import sys
from typing import Annotated

import typer
from rich.table import Table

from kvrelay.cli import options as o
from kvrelay.cli.console import err, out, run
from kvrelay.load.client import HANDOFF_MODES, PIPELINES, Answer, ask
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel


def generate(
    prompt: Annotated[str, typer.Argument(help="Text; - reads it from stdin.")],
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="PROMPT is token ids: 1,2,3.")] = False,
    system: Annotated[str, typer.Option(help="System message, with --chat.")] = "",
    router: o.Router = o.DEFAULT_ROUTER,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    seed: o.Seed = None,
    min_tokens: o.MinTokens = None,
    ignore_eos: o.IgnoreEos = False,
    stop: o.StopStrings = None,
    stop_id: o.StopIds = None,
    pipeline: o.Forced = None,
    handoff_mode: o.Handoff = None,
    cache_salt: o.Salt = "",
    timeout: o.Timeout = 300.0,
    as_json: o.Json = False,
) -> None:
    """Stream an answer; then its route, times, tokens by stage, hits, hand-off and WAN bytes (on stderr)."""
    request = router_pb2.GenerateRequest(stop=stop or [], cache_salt=cache_salt)
    request.sampling.CopyFrom(
        o.sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos or None,
            stop_token_ids=stop_id,
        )
    )
    o.forced(request, pipeline, handoff_mode)
    form = o.Form.CHAT if chat else o.Form.IDS if ids else o.Form.TEXT
    o.Input(sys.stdin.read() if prompt == "-" else prompt, form, system).put(request)
    run(_generate(router, request, timeout, as_json))


async def _generate(address: str, request: router_pb2.GenerateRequest, timeout_s: float, as_json: bool) -> int:
    async with open_channel(address, Purpose.TOKENS) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        shown = (lambda answer, reply: None) if as_json else _show
        answer = await ask(stub, request, timeout_s=timeout_s, on_reply=shown)
    if as_json:
        out.print_json(json.dumps(facts(answer) | {"ids": answer.ids, "text": answer.text}))
    else:
        out.print()
        if answer.completed is not None:
            err.print(_table(answer))
    if answer.error:
        err.print(f"[red]kvrelay:[/red] {address}: {answer.error}", markup=True, soft_wrap=True)
    return 0 if answer.ok else 1


def _show(answer: Answer, reply: router_pb2.GenerateReply) -> None:
    piece = reply.output.text if reply.WhichOneof("reply") == "output" else reply.completed.text
    out.print(piece, end="", markup=False, soft_wrap=True)
    out.file.flush()


def facts(answer: Answer) -> dict[str, object]:
    """What is said of an answer, in the words of demo-report.json where it has them."""
    started, completed = answer.started or router_pb2.Started(), answer.completed or router_pb2.Completed()
    report, usage = completed.report, completed.usage
    stall = report.handoff_stall_ms if report.HasField("handoff_stall_ms") else None
    return {
        "request_id": started.request_id,
        "seed": started.seed,
        "pipeline": PIPELINES.get(report.pipeline, ""),
        "reason": report.reason,
        "route": [stage for stage in (started.route.prefill, started.route.relay, started.route.main) if stage],
        "finish": finish(completed),
        "prompt_tokens": started.prompt_tokens,
        "cached_prefill_tokens": usage.cached_prefill_tokens,
        "cached_relay_tokens": usage.cached_relay_tokens,
        "cached_main_tokens": usage.cached_main_tokens,
        "ttft_ms": answer.ttft_ms,
        "tpot_ms": answer.tpot_ms,
        "e2el_ms": answer.e2el_ms,
        "tokens_prefill": answer.count("prefill"),
        "tokens_relay": answer.count("relay"),
        "tokens_main": answer.count("main"),
        "handoff_mode": HANDOFF_MODES.get(report.handoff_mode, ""),
        "handoff_stall_ms": stall,
        "max_gap_ms": report.max_gap_ms,
        "wan_bytes": report.wan_bytes,
        "fallbacks": list(report.fallbacks),
        "error": answer.error,
    }


def finish(completed: router_pb2.Completed) -> str:
    """ "eos", "length", ..., with the stop string that was found."""
    name = common_pb2.FinishReason.Name(completed.reason).removeprefix("FINISH_REASON_").lower()
    return f"{name} {completed.stop_string!r}" if completed.stop_string else name


def _table(answer: Answer) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    for name, value in facts(answer).items():
        if value not in ("", None, []):
            table.add_row(name, _shown(value))
    return table


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, list):
        return " → ".join(str(part) for part in value)
    return str(value)
