"""Subject of bench.engine: vLLM's CPU build, its engine stepped in this process, without a tokenizer."""

import time
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from bench.engine_plan import EnginePlan, Measured, prompt, samples, subject_plan


class Subject:
    """One engine."""

    def __init__(self, plan: EnginePlan) -> None:
        llm: Any = LLM(
            model=plan.weights,
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=8192,
            max_num_seqs=8,
            max_num_batched_tokens=max(plan.chunk, 512),
        )
        self.engine, self.opened = llm.llm_engine, 0

    def open(self, tokens: int, output: int) -> str:
        """A greedy sequence."""
        self.opened += 1
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.opened), TokensPrompt(prompt_token_ids=prompt(tokens, self.opened)), sampling)
        return str(self.opened)

    def finish(self) -> None:
        """Steps until nothing is left to do."""
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill(self, tokens: int) -> None:
        """One prompt to its first token."""
        self.open(tokens, 1)
        self.finish()

    def decode(self, plan: EnginePlan, count: int, context: int) -> list[float]:
        """Milliseconds of decode steps."""
        opened = {self.open(context - plan.steps // 2, plan.steps + plan.warm + 8) for _ in range(count)}
        seen: set[str] = set()
        while seen < opened:
            seen |= {output.request_id for output in self.engine.step()}
        times = []
        for _ in range(plan.warm + plan.steps):
            began = time.perf_counter()
            self.engine.step()
            times.append((time.perf_counter() - began) * 1e3)
        self.finish()
        return times[plan.warm :]


def main() -> None:
    """Everything."""
    plan = subject_plan()
    subject = Subject(plan)
    measured = Measured()
    for count, context in plan.decode:
        measured.decode_ms[f"b{count}_{context}"] = subject.decode(plan, count, context)
    for tokens, runs in plan.prefill:
        run = lambda tokens=tokens: subject.prefill(tokens)  # noqa: E731
        measured.prefill_s[str(tokens)] = samples(run, runs)
    measured.tell()


if __name__ == "__main__":
    main()
