"""`kvrelay load`: measures a router under load."""

import shlex
import sys

import typer

from kvrelay.cli import options as o
from kvrelay.cli.console import run
from kvrelay.cli.load import flags as f
from kvrelay.cli.load.own_limit import show_own_limit
from kvrelay.cli.load.session import Session
from kvrelay.cli.load.shown import Shown
from kvrelay.cli.load.wanted import Said, When, finite, parsed
from kvrelay.cli.load.whom import Whom
from kvrelay.load.hits import SKEWED
from kvrelay.load.hostile import Hostility
from kvrelay.load.lengths import Spreading
from kvrelay.load.traces.replay import Cut, TraceFormat
from kvrelay.load.worth import Prices, Slo
from kvrelay.proto.v1 import router_pb2


def load(
    router: f.Router = o.DEFAULT_ROUTER,
    wan: f.Wan = "",
    connections: f.Connections = 1,
    against: f.Against = "",
    model: f.Model = "",
    vocab: f.Vocab = None,
    as_text: f.AsText = False,
    timeout: f.Timeout = 300.0,
    temperature: f.Temperature = None,
    eos: f.Eos = False,
    pipeline: f.Forced = None,
    handoff_mode: f.Handoff = None,
    cache_salt: f.Salt = "",
    workload: f.Kind = f.WorkloadKind.HITS,
    conversations: f.Conversations = 20,
    hits: f.Hits = SKEWED,
    prompt_tokens: f.PromptTokens = "128-512",
    output_tokens: f.OutputTokens = "16-64",
    documents: f.Documents = 4,
    turns: f.Turns = "1",
    turn_tokens: f.TurnTokens = "16-64",
    think: f.Think = "0",
    groups: f.Groups = 0,
    prefix_tokens: f.PrefixTokens = "256",
    seed: f.Seed = 1,
    trace: f.Trace = None,
    format_: f.Format = TraceFormat.MOONCAKE,
    time_scale: f.TimeScale = 1.0,
    length_scale: f.LengthScale = 1.0,
    limit: f.Limit = None,
    start: f.Start = 0.0,
    end: f.End = None,
    arrival: f.Arrivals = None,
    concurrency: f.Concurrency = 4,
    rate: f.Rate = 0.0,
    burstiness: f.Burstiness = 1.0,
    ramp: f.Ramp = "",
    sweep: f.Sweep = "",
    sweep_share: f.SweepShare = 0.9,
    duration: f.Duration = None,
    grace: f.Grace = 30.0,
    warm_up: f.WarmUp = True,
    warm_up_s: f.WarmUpS = 0.0,
    most_in_flight: f.InFlight = None,
    processes: f.Processes = 1,
    cancel_rate: f.CancelRate = 0.0,
    cancel_after: f.CancelAfter = "0-1",
    slow_rate: f.SlowRate = 0.0,
    slow_pause: f.SlowPause = 0.1,
    probe_rate: f.ProbeRate = 0.0,
    goodput: f.Goodput = "",
    cost: f.Cost = "",
    check: f.Check = False,
    check_limit: f.CheckLimit = 32,
    self_test: f.SelfTest = False,
    jsonl: f.Jsonl = None,
    summary_json: f.SummaryJson = None,
    summary_csv: f.SummaryCsv = None,
    html: f.Html = None,
) -> None:
    """Ask many prompts; show times, pipelines, tokens by stage. Exit code 1 if any answer failed or was wrong."""
    if self_test:
        run(show_own_limit())
    template = router_pb2.GenerateRequest(return_text=False, cache_salt=cache_salt)
    template.sampling.CopyFrom(o.sampling(temperature=temperature, ignore_eos=not eos))
    o.forced(template, pipeline, handoff_mode)
    kind = f.WorkloadKind.TRACE if trace is not None else workload
    when = When(arrival, concurrency, rate, burstiness, ramp, seed, sweep, sweep_share)
    try:
        finite(timeout=timeout, temperature=temperature, time_scale=time_scale, length_scale=length_scale, start=start,
               end=end, rate=rate, burstiness=burstiness, duration=duration, grace=grace, warm_up_s=warm_up_s,
               cancel_rate=cancel_rate, slow_rate=slow_rate, slow_pause=slow_pause, probe_rate=probe_rate)  # fmt: skip
        session = Session(
            whom=Whom(router, wan, connections, template.SerializeToString(), against, model, vocab, as_text),
            said=Said(
                kind=kind, count=conversations, seed=seed, hits=hits, prompt_tokens=prompt_tokens,
                output_tokens=output_tokens, documents=documents, turns=turns, turn_tokens=turn_tokens, think_s=think,
                groups=groups, prefix_tokens=prefix_tokens, trace=trace, trace_format=format_,
                cut=Cut(start, end, limit, time_scale, length_scale),
            ),
            arrival=when.arrival(kind),
            search=when.search(kind, duration),
            duration_s=duration,
            grace_s=grace,
            timeout_s=timeout,
            warm_caches=warm_up,
            warm_up_s=warm_up_s,
            most_in_flight=most_in_flight,
            processes=processes,
            hostility=Hostility(
                cancel_rate, parsed("--cancel-after", Spreading.parse, cancel_after), slow_rate, slow_pause, probe_rate
            ),
            check_limit=check_limit if check else 0,
            shown=Shown(
                parsed("--goodput", Slo.parse, goodput) if goodput else None,
                parsed("--cost", Prices.parse, cost) if cost else None,
                jsonl, summary_json, summary_csv, html, shlex.join(["kvrelay", *sys.argv[1:]]),
            ),
        )  # fmt: skip
        session.refuse_nonsense()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    run(session.run())
