"""A weight matrix that multiplies, as it is or in int8 with a scale for each output. Knows no model."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """x [T, inputs] -> [T, outputs]; several matrices that share their input are stacked into one."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), *, int8: bool = False) -> None:
        """Weights [outputs_i, inputs] of one dtype and device; biases [outputs_i], or none at all."""
        self.weight = stacked(weights)
        self.scales: Tensor | None = None
        """[outputs], of an int8 weight: what one step of it stands for."""
        if int8:
            self.weight, self.scales = quantized(self.weight)
        self.bias = torch.cat(tuple(biases)) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return functional.linear(x, self.weight, self.bias)
        out = functional.linear(x, self.weight.to(x.dtype)).mul_(self.scales)
        return out if self.bias is None else out.add_(self.bias)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Matrices one above the other: the memory they are in if they follow each other there, else a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first.contiguous()
    end = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != end or not part.is_contiguous():
            return torch.cat(tuple(parts))
        end += part.nbytes
    return first.as_strided((sum(len(part) for part in parts), first.shape[1]), first.stride())


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [outputs, inputs] -> int8 of the same shape, and scales [outputs]; each row's greatest becomes 127."""
    scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny)
    return (weight / scales[:, None]).round_().to(torch.int8), scales
