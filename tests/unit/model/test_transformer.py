"""Any way of cutting the work into steps gives the logits of one pass, over any layout of the pool."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import ModelFileError
from kvrelay.model.batch import StepBatch
from kvrelay.model.weights import LoadedModel, load_model
from tests.unit.model.paging import Pool, Running, one_shot, step


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


TINY = load_model("tiny")


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 75), min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 4, 16]),
    sizes=st.lists(st.sampled_from([1, 2, 15, 16, 17, 40]), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 32),
)
def test_chunks_and_decode_rows_in_any_mix_equal_one_pass(
    lengths: list[int], block_tokens: int, sizes: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    prompts = [[chance.randrange(264) for _ in range(length)] for length in lengths]
    blocks = 6 * 80 // block_tokens + 6
    pool = Pool(TINY.config, torch.float64, block_tokens, blocks, chance.sample(range(blocks), blocks))
    running = [Running(ids) for ids in prompts]
    got: list[list[torch.Tensor]] = [[] for _ in running]
    while any(one.computed < len(one.ids) for one in running):
        work = []
        for one in running:
            left = len(one.ids) - one.computed
            count = min(left, chance.choice([0, *sizes]))
            if count:
                work.append((one, count))
        if not work:
            continue
        for (one, _), logits in zip(work, step(TINY.model, pool, work), strict=True):
            got[next(i for i, other in enumerate(running) if other is one)].append(logits)
    for ids, parts in zip(prompts, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), one_shot(TINY.model, ids), rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_one_token_at_a_time_equals_one_pass_at_block_edges(tiny: LoadedModel, length: int) -> None:
    ids = [(7 * i + 3) % 264 for i in range(length)]
    pool, sequence = Pool(tiny.config, torch.float64), Running(ids)
    rows = [step(tiny.model, pool, [(sequence, 1)])[0] for _ in ids]
    torch.testing.assert_close(torch.cat(rows), one_shot(tiny.model, ids), rtol=0, atol=1e-10)


def test_sequences_of_very_different_length_share_a_decode_step(tiny: LoadedModel) -> None:
    lengths = [1, 2, 17, 100, 300, 301]
    pool = Pool(tiny.config, torch.float64, blocks=80)
    running = [Running([(5 * i + n) % 264 for i in range(n + 1)]) for n in lengths]
    for one, length in zip(running, lengths, strict=True):
        step(tiny.model, pool, [(one, length)])
    last = step(tiny.model, pool, [(one, 1) for one in running])
    for one, logits in zip(running, last, strict=True):
        torch.testing.assert_close(logits[0], one_shot(tiny.model, one.ids)[-1], rtol=0, atol=1e-10)


def test_two_sequences_may_share_prefix_blocks(tiny: LoadedModel) -> None:
    prefix = [(3 * i) % 264 for i in range(32)]
    pool = Pool(tiny.config, torch.float64)
    first = Running([*prefix, 1, 2, 3])
    step(tiny.model, pool, [(first, 35)])
    second = Running([*prefix, 9, 8], computed=32, blocks=first.blocks[:2])
    (logits,) = step(tiny.model, pool, [(second, 2)])
    torch.testing.assert_close(logits, one_shot(tiny.model, second.ids)[32:], rtol=0, atol=1e-10)


def test_only_the_slots_of_new_tokens_are_written(tiny: LoadedModel) -> None:
    pool = Pool(tiny.config, torch.float64, blocks=4)
    before = pool.tensor.clone()
    sequence = Running(list(range(20)), blocks=[2, 0])
    step(tiny.model, pool, [(sequence, 18)])
    changed = (pool.tensor != before).any(-1).any(1).any(1).any(1)
    assert changed.tolist() == [[True] * 2 + [False] * 14, [False] * 16, [True] * 16, [False] * 16]


def test_no_wanted_rows_give_no_logits_and_still_write_kv(tiny: LoadedModel) -> None:
    ids = list(range(5))
    pool = Pool(tiny.config, torch.float64)
    at = torch.arange(5)
    none = torch.empty(0, dtype=torch.int64)
    logits = tiny.model.forward(StepBatch(at, at, at, [0, 5], [5], [[0]], none), pool.tensor)
    assert logits.shape == (0, tiny.config.vocab_size)
    (next_logits,) = step(tiny.model, pool, [(Running([*ids, 9], 5, [0]), 1)])
    torch.testing.assert_close(next_logits[0], one_shot(tiny.model, [*ids, 9])[-1], rtol=0, atol=1e-10)


def test_block_tables_may_be_longer_than_the_context(tiny: LoadedModel) -> None:
    pool, at = Pool(tiny.config, torch.float64), torch.arange(5)
    logits = tiny.model.forward(StepBatch(at, at, at, [0, 5], [5], [[0, 9, 33]], at), pool.tensor)
    torch.testing.assert_close(logits, one_shot(tiny.model, list(range(5))), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.6)])
def test_lower_precision_stays_near_float64_and_answers_in_float32(
    tiny: LoadedModel, dtype: str, tolerance: float
) -> None:
    low = load_model("tiny", dtype=dtype)
    ids = [(11 * i) % 264 for i in range(40)]
    logits = one_shot(low.model, ids)
    assert logits.dtype == torch.float32 and low.layout.dtype == dtype
    assert (logits - one_shot(tiny.model, ids)).abs().mean() < tolerance


def test_int8_weights_answer_nearly_alike_and_never_share_kv_with_float32(tiny: LoadedModel) -> None:
    narrow, ids = load_model("tiny", dtype="int8"), [(11 * i) % 264 for i in range(40)]
    logits = one_shot(narrow.model, ids)
    assert (logits - one_shot(tiny.model, ids)).abs().mean() < 0.1
    assert narrow.layout.kv_dtype == "float32" and narrow.model.dtype == torch.float32
    assert narrow.layout.block_bytes == load_model("tiny", dtype="float32").layout.block_bytes
    other = load_model("tiny", dtype="float32").layout
    assert narrow.layout.difference(other) == "dtype: int8 here, float32 there"


def test_int8_one_token_at_a_time_equals_one_pass_up_to_rounding() -> None:
    model = load_model("tiny", dtype="int8").model
    pool, sequence = Pool(model.config, torch.float32), Running([(7 * i + 3) % 264 for i in range(50)])
    rows = [step(model, pool, [(sequence, 1)])[0] for _ in sequence.ids]
    torch.testing.assert_close(torch.cat(rows), one_shot(model, sequence.ids), rtol=0, atol=1e-4)


def test_int8_on_another_device_is_refused() -> None:
    with pytest.raises(ModelFileError, match="int8 runs on the CPU only, not on cuda"):
        load_model("tiny", device="cuda", dtype="int8")


def test_packed_decode_rows_in_float32_equal_rows_alone_up_to_rounding() -> None:
    model = load_model("tiny", dtype="float32").model
    pool = Pool(model.config, torch.float32, blocks=64)
    running = [Running([(n * i + 1) % 264 for i in range(n)]) for n in range(20, 36)]
    for one in running:
        step(model, pool, [(one, len(one.ids) - 1)])
    packed = step(model, pool, [(one, 1) for one in running])
    for one, logits in zip(running, packed, strict=True):
        torch.testing.assert_close(logits[0], one_shot(model, one.ids)[-1], rtol=0, atol=1e-4)
