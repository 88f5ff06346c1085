"""Subject of bench.engine: kvrelay's own engine, whole steps of it: schedule, model, draw, post-process."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from bench.engine_plan import EnginePlan, Measured, prompt, subject_plan
from bench.engine_text import Logits, perplexity
from kvrelay.engine.engine import Engine, EngineConfig
from kvrelay.engine.events import Tokens
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.kvcache.pool import KvPool
from kvrelay.model.batch import StepBatch
from kvrelay.model.weights import load_model
from kvrelay.types import Sampling

MIXED_PREFILL = 2048
MIXED_CONTEXT = 512


class Subject:
    """One engine."""

    def __init__(self, plan: EnginePlan) -> None:
        torch.set_num_threads(plan.threads)
        began = time.perf_counter()
        self.loaded = loaded = load_model(plan.weights, dtype=plan.dtype)
        self.loaded_s = time.perf_counter() - began
        config = EngineConfig(pool_blocks=1024, token_budget=plan.chunk, prefix_cache=False)
        self.plan, self.engine, self.opened = plan, Engine(loaded, config), 0

    def open(self, tokens: int, output: int) -> str:
        """A greedy sequence."""
        self.opened += 1
        sampling = Sampling(seed=1, max_tokens=output, temperature=0, ignore_eos=True)
        self.engine.add(SequenceSpec(str(self.opened), prompt(tokens, self.opened), sampling))
        return str(self.opened)

    def until_first(self, sequence_id: str) -> list[float]:
        """Seconds of each step, up to the sequence's first token."""
        times = []
        while True:
            began = time.perf_counter()
            events = self.engine.step()
            times.append(time.perf_counter() - began)
            if any(to == sequence_id and isinstance(event, Tokens) for to, event in events):
                return times

    def steps(self, count: int) -> list[float]:
        """Seconds of each of `count` steps."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began)
        return times

    def prefill(self, tokens: int) -> list[float]:
        """Seconds of each step of one prefill."""
        one = self.open(tokens, 1)
        times = self.until_first(one)
        self.engine.close(one)
        return times

    def decode(self, count: int, context: int) -> list[float]:
        """Seconds of decode steps of `count` sequences whose context is about `context`."""
        plan = self.plan
        every = [self.open(context - plan.steps // 2, plan.steps + plan.warm + 4 + count) for _ in range(count)]
        self.until_first(every[-1])
        self.steps(plan.warm)
        times = self.steps(plan.steps)
        for one in every:
            self.engine.close(one)
        return times

    def logits(self, ids: Sequence[int]) -> Logits:
        """Of all rows, in chunks as long as a prefill's."""
        pool, rows = KvPool(self.loaded.layout, -(-len(ids) // 16)), []
        for start in range(0, len(ids), self.plan.chunk):
            at = torch.arange(start, min(start + self.plan.chunk, len(ids)))
            blocks = [list(range(-(-len(ids) // 16)))]
            tokens = torch.tensor(ids[start : start + self.plan.chunk])
            rows.append(
                self.loaded.model.forward(
                    StepBatch(tokens, at, at, [0, len(at)], [start + len(at)], blocks, at - start), pool.tensor
                ).numpy()
            )
        return np.concatenate(rows)

    def mixed(self) -> tuple[float, float]:
        """Mean seconds of a step with one decode row and one prefill chunk; of a chunk's step alone."""
        chunks = MIXED_PREFILL // self.plan.chunk
        alone = sum(self.prefill(MIXED_PREFILL)) / chunks
        decoding = self.open(MIXED_CONTEXT, 1000)
        self.until_first(decoding)
        filling = self.open(MIXED_PREFILL - chunks, 1)
        both = sum(times := self.until_first(filling)) / len(times)
        self.engine.close(decoding)
        self.engine.close(filling)
        return both, alone


def main() -> None:
    """Everything, in an order that keeps the caches of one shape from warming the next."""
    plan = subject_plan()
    subject = Subject(plan)
    measured = Measured(extra={"load_s": [subject.loaded_s]})
    for count, context in plan.decode:
        measured.decode_ms[f"b{count}_{context}"] = [s * 1e3 for s in subject.decode(count, context)]
    for tokens, runs in plan.prefill:
        measured.prefill_s[str(tokens)] = [sum(subject.prefill(tokens)) for _ in range(runs)]
    pairs = [subject.mixed() for _ in range(plan.mixed)]
    if pairs:
        measured.extra["mixed_step_ms"] = [both * 1e3 for both, _ in pairs]
        measured.extra["chunk_step_ms"] = [alone * 1e3 for _, alone in pairs]
    if plan.windows:
        measured.extra["perplexity"] = [perplexity(plan.weights, plan.windows, subject.logits)]
    measured.tell()


if __name__ == "__main__":
    main()
