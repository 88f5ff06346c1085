"""Matrices that share their input are one product, and are copied only where memory does not hold them together."""

import torch

from kvrelay.model.linear import Linear, quantized, stacked

MEMORY = torch.arange(24, dtype=torch.float32)


def test_matrices_that_follow_each_other_in_memory_are_not_copied() -> None:
    one = stacked([MEMORY[4:10].view(2, 3), MEMORY[10:13].view(1, 3), MEMORY[13:19].view(2, 3)])
    assert one.shape == (5, 3) and one.data_ptr() == MEMORY[4:].data_ptr()
    assert torch.equal(one, MEMORY[4:19].view(5, 3))


def test_matrices_that_lie_elsewhere_are_copied() -> None:
    for parts in (
        [MEMORY[:6].view(2, 3), MEMORY[9:12].view(1, 3)],
        [MEMORY[6:12].view(2, 3), MEMORY[:6].view(2, 3)],
        [MEMORY[:6].view(2, 3), MEMORY[6:12].clone().view(2, 3)],
        [MEMORY[:6].view(3, 2).T, MEMORY[6:12].view(2, 3)],
    ):
        one = stacked(parts)
        assert torch.equal(one, torch.cat(parts)) and one.data_ptr() != MEMORY.data_ptr()


def test_a_bias_is_added() -> None:
    linear = Linear([MEMORY[:6].view(2, 3), MEMORY[6:9].view(1, 3)], [torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert linear(torch.tensor([[1.0, 1.0, 1.0]])).tolist() == [[4.0, 14.0, 24.0]]


def test_int8_is_off_by_half_a_step_at_most_and_keeps_each_rows_greatest() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1e-3], [1], [50], [0], [7]]
    )
    narrow, scales = quantized(weight)
    assert narrow.dtype == torch.int8 and scales.shape == (5,)
    assert ((narrow * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all()
    assert narrow.abs().amax(1).tolist() == [127, 127, 127, 0, 127]


def test_an_int8_product_is_that_of_what_its_weights_stand_for() -> None:
    weight, bias = torch.randn(6, 8), torch.randn(6)
    linear, x = Linear([weight], [bias], int8=True), torch.randn(3, 8)
    assert linear.scales is not None
    torch.testing.assert_close(linear(x), x @ (linear.weight * linear.scales[:, None]).T + bias)
