"""What the transformer asks of a checkpoint: named tensors, checked. Knows no file format."""

from typing import Protocol

import torch
from torch import Tensor

from kvrelay.errors import ModelFileError


class WeightSource(Protocol):
    """A checkpoint's tensors under the names that Hugging Face's Llama uses, q and k in its half-split order."""

    @property
    def where(self) -> str:
        """The file or directory, for errors."""
        ...

    def tensor(self, name: str) -> Tensor | None:
        """The tensor in any floating dtype, on the CPU; None if the checkpoint has none of that name.

        Raises ModelFileError if it cannot be read.
        """
        ...


def take(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that must exist, be finite and have this shape. Raises ModelFileError naming file, tensor and cause."""
    tensor = source.tensor(name)
    if tensor is None:
        raise ModelFileError(f"{source.where}: tensor {name} is missing")
    if tuple(tensor.shape) != shape:
        raise ModelFileError(f"{source.where}: tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
    if not tensor.is_floating_point():
        raise ModelFileError(f"{source.where}: tensor {name} has dtype {tensor.dtype}, not a floating one")
    if not tensor.sum(dtype=torch.float64).isfinite():
        raise ModelFileError(f"{source.where}: tensor {name} holds values that are not finite")
    return tensor
