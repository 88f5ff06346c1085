"""What every subject of bench.engine measures, and how it tells. Runs in peers' interpreters too."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Equal for all subjects of a run."""

    weights: str = ""
    """As the subject wants it: a model name, a folder or a file."""
    threads: int = 2
    dtype: str = "float32"
    """Of the weights, where the subject converts them itself."""
    steps: int = 24
    """Timed decode steps of each shape, after `warm` ones."""
    warm: int = 4
    prefill: tuple[tuple[int, int], ...] = ((512, 3), (2048, 3), (4096, 3))
    """(tokens, timed runs), after the prefills that decode's shapes need."""
    decode: tuple[tuple[int, int], ...] = ((1, 512), (8, 512), (1, 4096))
    """(sequences, context)."""
    chunk: int = 512
    """Tokens of a prefill chunk, where the subject can be told."""
    mixed: int = 3
    """Runs with decode rows beside prefill chunks, where the subject can do that."""
    windows: int = 0
    """Windows of text whose perplexity is measured."""

    def argument(self, weights: str) -> str:
        """For the subject's command line."""
        return json.dumps(asdict(self) | {"weights": weights})

    @classmethod
    def parse(cls, text: str) -> "EnginePlan":
        """Back from argument()."""
        raw = json.loads(text)
        pairs = {name: tuple((one, other) for one, other in raw[name]) for name in ("prefill", "decode")}
        return cls(**raw | pairs)


@dataclass(slots=True)
class Measured:
    """One subject's samples."""

    decode_ms: dict[str, list[float]] = field(default_factory=dict)
    """"b<sequences>_<context>" -> step times."""
    prefill_s: dict[str, list[float]] = field(default_factory=dict)
    """"<tokens>" -> times from nothing to the first token."""
    extra: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    def tell(self) -> None:
        """The subject's last line."""
        print(json.dumps(asdict(self)))


def subject_plan() -> EnginePlan:
    """From the command line."""
    return EnginePlan.parse(sys.argv[1])


def samples(run: Callable[[], object], count: int, warm: int = 0) -> list[float]:
    """Seconds of `count` calls, after `warm` untimed ones."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times


def prompt(tokens: int, seed: int = 1) -> list[int]:
    """Token ids, the same for every subject, different for each seed."""
    return [(seed * 7919 + i * 104729) % 40000 + 100 for i in range(tokens)]
