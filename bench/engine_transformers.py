"""Subject of bench.engine: Hugging Face transformers, its dynamic cache and SDPA attention."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.engine_plan import EnginePlan, Measured, prompt, samples, subject_plan


def decode(model: Any, plan: EnginePlan, count: int, context: int) -> list[float]:
    """Milliseconds of greedy decode steps."""
    ids = torch.tensor([prompt(context - plan.steps // 2, seed) for seed in range(count)])
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(plan.warm + plan.steps):
        began = time.perf_counter()
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        times.append((time.perf_counter() - began) * 1e3)
    return times[plan.warm :]


def main() -> None:
    """Everything."""
    plan = subject_plan()
    torch.set_num_threads(plan.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(plan.weights, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    measured = Measured()
    with torch.inference_mode():
        for count, context in plan.decode:
            measured.decode_ms[f"b{count}_{context}"] = decode(model, plan, count, context)
        for tokens, runs in plan.prefill:
            ids = torch.tensor([prompt(tokens)])
            run = lambda ids=ids: model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax()  # noqa: E731
            measured.prefill_s[str(tokens)] = samples(run, runs)
    measured.tell()


if __name__ == "__main__":
    main()
