"""Subject of bench.engine: llama.cpp's prebuilt library from npm (@node-llama-cpp/linux-x64), through ctypes.

The library picks the fastest CPU back end for the machine; the wheels found on PyPI stop at AVX2. Its KV is float16, by
its own default. Structures below are those of the release pinned in bench.engine_peers.
"""

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine_peers import MODEL
from bench.engine_plan import EnginePlan, Measured, prompt, samples, subject_plan
from bench.engine_text import WINDOW, Logits, perplexity

LIBRARIES = Path(os.environ.get("LLAMACPP_LIBRARIES", "."))
NAMES = ("libggml-base.so", "libggml.v0.5.0.so", "libllama.v0.5.0.so")


class ModelParams(ctypes.Structure):
    """Passed on as it came."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


class ContextParams(ctypes.Structure):
    """The head is what is set here; the rest is passed on as it came."""

    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("rest", ctypes.c_uint32 * 55),
    ]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class Llama:
    """A model and one context."""

    def __init__(self, plan: EnginePlan) -> None:
        base, ggml, self.lib = (ctypes.CDLL(str(LIBRARIES / name), mode=ctypes.RTLD_GLOBAL) for name in NAMES)
        ggml.ggml_backend_load_all_from_path(str(LIBRARIES).encode())
        lib = self.lib
        lib.llama_model_default_params.restype = ModelParams
        lib.llama_context_default_params.restype = ContextParams
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
        lib.llama_init_from_model.restype = ctypes.c_void_p
        lib.llama_init_from_model.argtypes = [ctypes.c_void_p, ContextParams]
        lib.llama_get_memory.restype = ctypes.c_void_p
        lib.llama_get_memory.argtypes = [ctypes.c_void_p]
        lib.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
        lib.llama_decode.argtypes = [ctypes.c_void_p, Batch]
        lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        lib.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        lib.llama_print_system_info.restype = ctypes.c_char_p
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        lib.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
        self.model = model = lib.llama_model_load_from_file(plan.weights.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        if not model or (params.n_ctx, params.n_batch, params.n_ubatch) != (512, 2048, 512):
            raise RuntimeError("llama.cpp: the model cannot be loaded, or its structures are not those of the release")
        params.n_ctx, params.n_seq_max, params.n_outputs_max = 8 * 4608, 8, WINDOW if plan.windows else 8
        params.n_batch, params.n_ubatch = 4096, plan.chunk
        params.n_threads = params.n_threads_batch = plan.threads
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp: no context")

    def clear(self) -> None:
        """Forgets all sequences."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, logits wanted)."""
        n = len(rows)
        ids = [(ctypes.c_int32 * 1)(row[2]) for row in rows]
        pointers: Any = (ctypes.POINTER(ctypes.c_int32) * n)(
            *[ctypes.cast(i, ctypes.POINTER(ctypes.c_int32)) for i in ids]
        )
        ints = lambda values: (ctypes.c_int32 * n)(*values)  # noqa: E731
        batch = Batch(
            n,
            ints(row[0] for row in rows),
            None,
            ints(row[1] for row in rows),
            ints([1] * n),
            pointers,
            (ctypes.c_int8 * n)(*[row[3] for row in rows]),
        )
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode")

    def prefill(self, ids: list[int], sequence: int = 0) -> None:
        """One prompt, the last row's logits."""
        last = len(ids) - 1
        self.decode([(token, at, sequence, at == last) for at, token in enumerate(ids)])

    def logits(self, ids: Sequence[int]) -> Logits:
        """Of all rows."""
        self.clear()
        self.decode([(token, at, 0, True) for at, token in enumerate(ids)])
        vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        rows = [self.lib.llama_get_logits_ith(self.context, at) for at in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (vocab,)) for row in rows])


def decode(llama: Llama, plan: EnginePlan, count: int, context: int) -> list[float]:
    """Milliseconds of decode steps."""
    llama.clear()
    start = context - plan.steps // 2
    for sequence in range(count):
        llama.prefill(prompt(start, sequence), sequence)
    times = []
    for step in range(plan.warm + plan.steps):
        began = time.perf_counter()
        llama.decode([(100 + step, start + step, sequence, True) for sequence in range(count)])
        times.append((time.perf_counter() - began) * 1e3)
    return times[plan.warm :]


def main() -> None:
    """Everything."""
    plan = subject_plan()
    llama = Llama(plan)
    measured = Measured(note=llama.lib.llama_print_system_info().decode())
    for count, context in plan.decode:
        measured.decode_ms[f"b{count}_{context}"] = decode(llama, plan, count, context)
    for tokens, runs in plan.prefill:

        def run(tokens: int = tokens) -> None:
            llama.clear()
            llama.prefill(prompt(tokens))

        measured.prefill_s[str(tokens)] = samples(run, runs)
    if plan.windows:
        measured.extra["perplexity"] = [perplexity(MODEL, plan.windows, llama.logits)]
    measured.tell()


if __name__ == "__main__":
    main()
