"""An engine with a fake model under observation: events by sequence, integrity after each step, and the reference."""

import functools
from collections import defaultdict
from dataclasses import replace
from typing import Any, TypeVar

from kvrelay.engine.engine import Engine, EngineConfig
from kvrelay.engine.events import Admitted, Event, Failed, Finished, Tokens
from kvrelay.engine.reference import ReferenceResult, generate_reference
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.types import Sampling
from tests.fakes import fake_block_bytes, fake_model

BLOCK = 4
EDGES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]
"""Lengths around block edges."""
E = TypeVar("E", bound=Event)


def prompt(length: int, first: int = 1) -> list[int]:
    """Ids that count up from `first`."""
    return [(first + at) % 64 for at in range(length)]


def sampling(**change: Any) -> Sampling:
    """Seeded, 8 tokens, no EOS."""
    return replace(Sampling(seed=1, max_tokens=8, ignore_eos=True), **change)


@functools.lru_cache(maxsize=4096)
def reference(prompt: tuple[int, ...], how: Sampling, max_model_tokens: int) -> ReferenceResult:
    """What one engine alone answers."""
    return generate_reference(fake_model(BLOCK), prompt, how, max_model_tokens=max_model_tokens, with_margins=False)


class Probe:
    def __init__(self, pool_blocks: int = 32, **config: Any) -> None:
        self.loaded = fake_model(BLOCK)
        self.engine = Engine(self.loaded, EngineConfig(pool_blocks=pool_blocks, **config))
        self.specs: dict[str, SequenceSpec] = {}
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.known: dict[str, list[int]] = {}
        """Output ids given or sampled, by sequence."""

    @property
    def model(self) -> Any:
        return self.loaded.model

    def add(self, name: str, prompt: list[int], how: Sampling | None = None, **spec: Any) -> None:
        self.specs[name] = SequenceSpec(name, prompt, how or sampling(), **spec)
        self.engine.add(self.specs[name])
        self.known[name] = []
        self.events[name] = []

    def expected(self, name: str) -> ReferenceResult:
        spec = self.specs[name]
        return reference(tuple(spec.prompt_ids), spec.sampling, self.engine.max_model_tokens)

    def step(self) -> None:
        """One step; each token must be the reference's at its index."""
        for name, event in self.engine.step():
            self.events[name].append(event)
            if isinstance(event, Tokens):
                known = self.known[name]
                assert event.run.first_index == len(known), "a gap or a repeated token"
                known += event.run.ids
                assert tuple(known) == self.expected(name).ids[: len(known)]
            if isinstance(event, Finished):
                answer = self.expected(name)
                assert (event.reason, event.completion_tokens) == (answer.reason, len(answer.ids))
        self.engine.check_integrity()

    def run(self, steps: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        while self.engine.has_work():
            self.step()
            steps -= 1
            assert steps > 0, "the engine does not come to rest"

    def extend(self, name: str, count: int, resume: bool = False) -> None:
        """Gives the reference's next `count` ids."""
        first = len(self.known[name])
        ids = list(self.expected(name).ids[first : first + count])
        self.known[name] += ids
        self.engine.extend(name, ids, first, resume)

    def deliver(self, name: str, blocks: int | None = None) -> None:
        """Writes the leading blocks (all: None) that are not cached, as a transfer would."""
        admitted = self.of(name, Admitted)[0]
        total = len(admitted.block_ids) if blocks is None else blocks
        for block in range(admitted.cached_tokens // BLOCK, total):
            payload = fake_block_bytes(self.specs[name].prompt_ids, block, BLOCK)
            self.engine.pool.write(admitted.block_ids[block], 0, payload)

    def commit(self, name: str) -> None:
        """Delivers everything and says so."""
        self.deliver(name)
        self.engine.commit(name, len(self.specs[name].prompt_ids) // BLOCK)

    def close(self, name: str, kept_blocks: int = 0) -> None:
        self.engine.close(name, kept_blocks)
        self.engine.check_integrity()
        del self.known[name]

    def close_all(self) -> None:
        for name in list(self.known):
            self.close(name)
        self.engine.check_idle()

    def of(self, name: str, kind: type[E]) -> list[E]:
        return [event for event in self.events[name] if isinstance(event, kind)]

    def failed(self, name: str) -> Failed | None:
        return next(iter(self.of(name, Failed)), None)
