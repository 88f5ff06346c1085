"""Compiled kernels give what torch's plain operations give, whatever the shapes, the batch and the threads."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.model import tiny
from kvrelay.model.batch import StepBatch
from kvrelay.model.config import ModelConfig
from kvrelay.model.native import tiles
from kvrelay.model.transformer import Transformer

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


class Random:
    """A small model of any shape."""

    where = "random"

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._chance = torch.Generator().manual_seed(5)

    def tensor(self, name: str) -> Tensor | None:
        c = self._config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        shape = {
            "embed_tokens": (c.vocab_size, c.hidden),
            "lm_head": (c.vocab_size, c.hidden),
            "q_proj": (q, c.hidden),
            "k_proj": (kv, c.hidden),
            "v_proj": (kv, c.hidden),
            "o_proj": (c.hidden, q),
            "gate_proj": (c.intermediate, c.hidden),
            "up_proj": (c.intermediate, c.hidden),
            "down_proj": (c.hidden, c.intermediate),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
        }.get(part, (c.hidden,))
        return torch.randn(shape, generator=self._chance, dtype=torch.float64) * (1.0 if len(shape) == 1 else 0.3)


def config(kv_heads: int, group: int, head_dim: int, *, qk_norm: bool = False, tiled: bool = False) -> ModelConfig:
    """tiled: of sizes that AMX tiles take, where there are any, if head_dim is one too."""
    return ModelConfig(
        family="qwen3" if qk_norm else "llama",
        vocab_size=20,
        hidden=64 if tiled else 24,
        intermediate=96 if tiled else 20,
        layers=2,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=10000.0,
        max_positions=4096,
        eos_token_ids=(1,),
        qk_norm=qk_norm,
    )


def ways(model: Transformer, batch: StepBatch, pool: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and pool by plain torch, by the kernel of many rows, and as the model would do it."""
    few, many = model._few, model._many
    try:
        for model._few, model._many in ((None, None), (None, many), (few, many)):
            mine = pool.clone()
            yield model.forward(batch, mine), mine
    finally:
        model._few, model._many = few, many


def batch_of(work: Sequence[tuple[int, int]], block_tokens: int, blocks: Sequence[int]) -> StepBatch:
    """Sequences of (context with the new tokens, new tokens), their blocks taken from `blocks` in turn."""
    ids, positions, slots, starts, tables = [], [], [], [0], []
    free = iter(blocks)
    for context, new in work:
        table = [next(free) for _ in range(-(-context // block_tokens))]
        tables.append(table)
        for at in range(context - new, context):
            ids.append(at % 20)
            positions.append(at)
            slots.append(table[at // block_tokens] * block_tokens + at % block_tokens)
        starts.append(len(ids))
    return StepBatch(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(slots),
        starts,
        [context for context, _ in work],
        tables,
        torch.arange(len(ids)),
    )


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@st.composite
def works(draw: st.DrawFn) -> list[tuple[int, int]]:
    one = st.integers(1, 300).flatmap(
        lambda context: st.tuples(st.just(context), st.sampled_from([n for n in (1, 2, 4, 5, 9, 40) if n <= context]))
    )
    return draw(st.lists(one, min_size=1, max_size=4))


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([2, 6, 8, 20, 32, 64, 96]),
    qk_norm=st.booleans(),
    tiled=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int8]),
    block_tokens=st.sampled_from([1, 3, 16, 256]),
    work=works(),
)
def test_kernels_equal_plain_torch(
    kv_heads: int,
    group: int,
    head_dim: int,
    qk_norm: bool,
    tiled: bool,
    dtype: torch.dtype,
    block_tokens: int,
    work: list[tuple[int, int]],
) -> None:
    shape = config(kv_heads, group, head_dim, qk_norm=qk_norm, tiled=tiled)
    int8, dtype = dtype == torch.int8, torch.float32 if dtype == torch.int8 else dtype
    model = Transformer(shape, Random(shape), torch.device("cpu"), dtype, int8=int8)
    blocks = sum(-(-context // block_tokens) for context, _ in work)
    chance = torch.Generator().manual_seed(blocks)
    order: list[int] = torch.randperm(blocks, generator=chance).tolist()
    pool = torch.randn(blocks, 2, 2, kv_heads, block_tokens, head_dim, generator=chance, dtype=dtype)
    (plain_logits, plain_kv), *others = ways(model, batch_of(work, block_tokens, order), pool)
    scale = float(plain_logits.abs().max()) + 1
    for logits, kv in others:
        torch.testing.assert_close(logits, plain_logits, rtol=0, atol=TOLERANCE[dtype] * scale)
        torch.testing.assert_close(kv, plain_kv, rtol=0, atol=TOLERANCE[dtype] * (float(plain_kv.abs().max()) + 1))


@pytest.fixture(scope="module")
def model() -> Transformer:
    shape = config(3, 3, 64)
    return Transformer(shape, Random(shape), torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beside", [1, 2, 3, 7, 11, 31])
def test_a_row_of_a_small_step_is_the_same_to_the_last_bit_whatever_is_beside_it(
    dtype: torch.dtype, beside: int
) -> None:
    shape = config(3, 3, 64)
    model = Transformer(shape, Random(shape), torch.device("cpu"), dtype)
    pool = torch.randn(400, 2, 2, 3, 16, 64, dtype=dtype, generator=torch.Generator().manual_seed(1))
    order = list(range(400))
    alone, together = pool.clone(), pool.clone()
    logits = model.forward(batch_of([(500, 1)], 16, order), alone)
    with_others = model.forward(batch_of([(500, 1), *[(70 + n, 1) for n in range(beside)]], 16, order), together)
    assert torch.equal(logits[0], with_others[0])
    assert torch.equal(alone[:32], together[:32])


def test_a_small_step_is_the_same_to_the_last_bit_on_one_thread_and_on_two(model: Transformer) -> None:
    pool = torch.randn(80, 2, 2, 3, 16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch, found = batch_of([(500, 1), (300, 3)], 16, list(range(80))), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(model.forward(batch, pool.clone()))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("new", [1, 37])
def test_slots_beyond_the_context_are_never_read(dtype: torch.dtype, new: int) -> None:
    shape = config(3, 3, 64, tiled=True)
    model = Transformer(shape, Random(shape), torch.device("cpu"), dtype)
    pool = torch.zeros(4, 2, 2, 3, 16, 64, dtype=dtype)
    dirty = pool.clone()
    dirty[2, :, :, :, 5:] = torch.nan
    dirty[3] = torch.nan
    batch = batch_of([(37, new)], 16, [0, 1, 2])
    assert torch.equal(model.forward(batch, dirty), model.forward(batch, pool))


@pytest.mark.parametrize(("dtype", "tiled"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
@pytest.mark.parametrize("cuts", [(150,), (33, 117), (64, 86), (100, 50)])
def test_a_row_of_a_long_chunk_is_the_same_to_the_last_bit_however_the_prompt_is_cut(
    dtype: torch.dtype, tiled: bool, cuts: tuple[int, ...]
) -> None:
    shape = config(3, 3, 64, tiled=tiled)
    model = Transformer(shape, Random(shape), torch.device("cpu"), dtype)
    pool = torch.randn(40, 2, 2, 3, 16, 64, dtype=dtype, generator=torch.Generator().manual_seed(1))
    order, whole = list(range(40)), pool.clone()
    wanted = model.forward(batch_of([(150, 150)], 16, order), whole)
    torch.set_num_threads(3 - torch.get_num_threads())
    end, found = 0, []
    for cut in cuts:
        end += cut
        # Something beside it, so that it begins in the middle of a panel.
        beside = batch_of([(40, 3), (end, cut)], 16, [*range(20, 23), *order[:20]])
        found.append(model.forward(beside, pool)[3:])
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(pool[:9], whole[:9])


def test_cpus_with_short_vectors_leave_long_steps_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.model.transformer.few_rows", lambda: 4)
    shape, weights, _ = tiny.open_tiny()
    narrow = Transformer(shape, weights, torch.device("cpu"), torch.float64)
    assert narrow._few is not None and narrow._many is None


def test_the_tiny_model_takes_the_kernels() -> None:
    shape, weights, _ = tiny.open_tiny()
    assert Transformer(shape, weights, torch.device("cpu"), torch.float64)._few is not None
    assert Transformer(shape, weights, torch.device("cpu"), torch.bfloat16)._few is None


@pytest.mark.parametrize("wanted", [[], [0], [5, 149], [149]])
def test_rows_that_nobody_wants_leave_the_same_kv_and_the_same_logits_of_the_others(wanted: list[int]) -> None:
    shape = config(3, 3, 64)
    model = Transformer(shape, Random(shape), torch.device("cpu"), torch.float64)
    whole = torch.zeros(20, 2, 2, 3, 16, 64, dtype=torch.float64)
    pool, batch = whole.clone(), batch_of([(40, 3), (150, 147)], 16, list(range(20)))
    every = model.forward(batch, whole)
    some = model.forward(replace(batch, logit_rows=torch.tensor(wanted, dtype=torch.int64)), pool)
    torch.testing.assert_close(some, every[wanted], rtol=0, atol=1e-12)  # torch's head sums in an order of its own
    assert torch.equal(pool, whole)


@pytest.mark.parametrize(
    ("shape", "dtype", "fit"),
    [
        (config(3, 3, 64, tiled=True), torch.float32, True),
        (config(3, 3, 64, tiled=True), torch.float64, False),
        (config(3, 3, 64), torch.float32, False),
        (config(3, 3, 20, tiled=True), torch.float32, False),
    ],
)
def test_float32_of_sizes_that_tiles_take_goes_through_them_where_there_are_any(
    shape: ModelConfig, dtype: torch.dtype, fit: bool
) -> None:
    model = Transformer(shape, Random(shape), torch.device("cpu"), dtype)
    assert model._many is not None and model._many.tiled == (fit and tiles())


def test_two_long_steps_at_once_give_what_each_gives_alone() -> None:
    shape = config(3, 3, 64, tiled=True)
    model = Transformer(shape, Random(shape), torch.device("cpu"), torch.float32)
    batches = [batch_of([(new, new)], 16, list(range(20))) for new in (300, 150)]

    def forward(batch: StepBatch) -> Tensor:
        return model.forward(batch, torch.zeros(20, 2, 2, 3, 16, 64))

    alone = [forward(batch) for batch in batches]
    with ThreadPoolExecutor(2) as threads:
        for found, wanted in zip(threads.map(forward, batches * 4), alone * 4, strict=True):
            assert torch.equal(found, wanted)
