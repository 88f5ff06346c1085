"""The flags of `kvrelay load`, by panel of its help. Knows no more than their words."""

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrelay.load.traces.replay import TraceFormat
from kvrelay.types import HandoffMode, Pipeline


class WorkloadKind(enum.StrEnum):
    """What the clients say."""

    HITS = "hits"
    RANDOM = "random"
    AGENTS = "agents"
    TRACE = "trace"


class ArrivalKind(enum.StrEnum):
    """When they say it."""

    CLOSED = "closed"
    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    RAMP = "ramp"
    SWEEP = "sweep"
    TRACE = "trace"


def _in(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


WHOM, SAID, TRACED, WHEN, HOSTILE, SHOWN = (
    "Whom to ask", "What is said (lengths: N, LOW-HIGH, or lognormal:MEDIAN:SIGMA[:MAX])", "Trace replay",
    "When", "Hostile clients", "Report",
)  # fmt: skip

Router = Annotated[str, _in(WHOM, "host:port of the router.")]
Wan = Annotated[str, _in(WHOM, "Admin address of the WAN emulator: shows link use.", metavar="HOST:PORT")]
Connections = Annotated[int, _in(WHOM, "To the router, per process.", min=1, metavar="N")]
Against = Annotated[
    str, _in(WHOM, "Ask any server with OpenAI's /v1/completions instead (key: OPENAI_API_KEY).", metavar="URL")
]
Model = Annotated[str, _in(WHOM, "--against: the model to ask for.", metavar="NAME")]
Vocab = Annotated[int | None, _in(WHOM, "Ids are drawn below N (default: the fleet's; 32000).", min=64, metavar="N")]
AsText = Annotated[bool, _in(WHOM, "--against: prompts are words, for servers that take no ids.", "--as-text")]
Timeout = Annotated[float, _in(WHOM, "Of a request.", min=0.001, metavar="S")]
Temperature = Annotated[float | None, _in(WHOM, "0 = greedy.", min=0)]
Eos = Annotated[bool, _in(WHOM, "Whether an answer may end before its length.")]
Forced = Annotated[Pipeline | None, _in(WHOM, "Force p-md, p-rld-md, p-rld or md.", "--pipeline", metavar="NAME")]
Handoff = Annotated[HandoffMode | None, _in(WHOM, "Force one-shot, catch-up or dynamic.", metavar="MODE")]
Salt = Annotated[str, _in(WHOM, "KV is shared among equal salts only.", metavar="TEXT")]

Kind = Annotated[
    WorkloadKind,
    _in(SAID, "hits: shares of documents; random; agents: turns and tools; trace.", "--workload", metavar="NAME"),
]
Conversations = Annotated[int, _in(SAID, "How many; 0: endless (with --duration).", "--conversations", "-n", min=0)]
Hits = Annotated[str, _in(SAID, "First prompts' hit rates: RATE:WEIGHT,...")]
PromptTokens = Annotated[str, _in(SAID, "Of first prompts (agents: of their tasks).")]
OutputTokens = Annotated[str, _in(SAID, "Of each answer.")]
Documents = Annotated[int, _in(SAID, "hits: that prompts share; agents: kinds of them.", min=1, metavar="N")]
Turns = Annotated[str, _in(SAID, "Requests a conversation.")]
TurnTokens = Annotated[str, _in(SAID, "New ids of a later turn: what a user or a tool says.")]
Think = Annotated[str, _in(SAID, "Seconds before a later turn: reading, or a tool's time.")]
Groups = Annotated[int, _in(SAID, "random: groups that share a prefix; 0: none.", min=0, metavar="N")]
PrefixTokens = Annotated[str, _in(SAID, "Of a group's prefix; of an agent's system prompt.")]
Seed = Annotated[int, _in(SAID, "Same seed, same requests at the same moments.", min=0)]

Trace = Annotated[Path | None, _in(TRACED, "The file.", dir_okay=False)]
Format = Annotated[TraceFormat, _in(TRACED, "mooncake, azure, burstgpt or splitwise.", "--format", metavar="NAME")]
TimeScale = Annotated[float, _in(TRACED, "Multiplies times: 0.5 = twice as fast.", min=1e-9, metavar="X")]
LengthScale = Annotated[float, _in(TRACED, "Multiplies lengths.", min=1e-9, metavar="X")]
Limit = Annotated[int | None, _in(TRACED, "Requests at most.", min=1, metavar="N")]
Start = Annotated[float, _in(TRACED, "From here, by the trace's clock, since its first request.", min=0, metavar="S")]
End = Annotated[float | None, _in(TRACED, "To here.", min=0, metavar="S")]

Arrivals = Annotated[
    ArrivalKind | None,
    _in(WHEN, "closed, poisson (with --rate), gamma, constant, ramp, sweep, trace.", "--arrival",
        metavar="NAME"),
]  # fmt: skip
Concurrency = Annotated[int, _in(WHEN, "Closed loop: clients.", "--concurrency", "-c", min=1)]
Rate = Annotated[float, _in(WHEN, "Conversations a second, however answers fare.", min=0.0, metavar="HZ")]
Burstiness = Annotated[float, _in(WHEN, "gamma: 1 = Poisson; below: in bursts.", min=0.01, metavar="X")]
Ramp = Annotated[str, _in(WHEN, "Rate from one value to another: FROM-TO:SECONDS.", metavar="RAMP")]
Sweep = Annotated[
    str, _in(WHEN, "Rates rise from FROM until one is not carried: the knee. --duration is each step's.",
             metavar="FROM[-TO]"),
]  # fmt: skip
SweepShare = Annotated[
    float, _in(WHEN, "Of a step's requests that must be whole, in time and good.", min=0.01, max=1, metavar="X")
]
Duration = Annotated[float | None, _in(WHEN, "No conversation starts later.", min=0.001, metavar="S")]
Grace = Annotated[float, _in(WHEN, "After --duration, for answers to end.", min=0, metavar="S")]
WarmUp = Annotated[bool, _in(WHEN, "Send the shared prefixes first.")]
WarmUpS = Annotated[float, _in(WHEN, "Requests due within it are not counted.", "--warm-up-s", min=0, metavar="S")]
InFlight = Annotated[int | None, _in(WHEN, "More wait here, shown as client queue.", min=1, metavar="N")]
Processes = Annotated[int, _in(WHEN, "That share the conversations.", min=1, max=64, metavar="N")]

CancelRate = Annotated[float, _in(HOSTILE, "Share of requests that are cancelled.", min=0, max=1, metavar="X")]
CancelAfter = Annotated[str, _in(HOSTILE, "Seconds until then.")]
SlowRate = Annotated[float, _in(HOSTILE, "Share of requests that are read slowly.", min=0, max=1, metavar="X")]
SlowPause = Annotated[float, _in(HOSTILE, "Before each message.", min=0, metavar="S")]
ProbeRate = Annotated[float, _in(HOSTILE, "Share of requests that want one token.", min=0, max=1, metavar="X")]

Goodput = Annotated[str, _in(SHOWN, "Limits in ms: ttft=…,ttst=…,tpot=…,e2el=…,gap=….", metavar="LIMITS")]
Cost = Annotated[str, _in(SHOWN, "Price of a stage by role: prefill=…,relay=…,main=….", metavar="PRICES")]
Check = Annotated[bool, _in(SHOWN, "Compare answers with one engine's; exit code 1 at a difference.", "--check")]
CheckLimit = Annotated[int, _in(SHOWN, "Answers compared at most, evenly chosen.", min=1, metavar="N")]
SelfTest = Annotated[bool, _in(SHOWN, "Measure what this generator can drive on one core, and end.", "--self-test")]
Jsonl = Annotated[Path | None, _in(SHOWN, "Write a record a request.", dir_okay=False)]
SummaryJson = Annotated[Path | None, _in(SHOWN, "Write the summary.", dir_okay=False)]
SummaryCsv = Annotated[Path | None, _in(SHOWN, "Write the summary.", dir_okay=False)]
Html = Annotated[Path | None, _in(SHOWN, "Write the run as one page with charts.", dir_okay=False)]
