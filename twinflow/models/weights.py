"""Where a family gets its tensors from: by checkpoint name and expected shape, one at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from twinflow.contracts.errors import ModelError
from twinflow.models.checkpoint import Checkpoint


class Weights(Protocol):
    """A source of tensors in their runtime dtype and on their device."""

    def has(self, name: str) -> bool:
        """Whether a tensor of that name exists."""
        ...

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor called `name`, in `dtype` (None: the model's). Raises ModelError, naming the tensor, when it is
        missing or its shape is not `shape`."""
        ...

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raises ModelError when tensors are left that were neither taken nor start with a prefix in `ignored`: weights
        that the model would silently leave out."""
        ...


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows (n, ..) of all parts, one after another, as `torch.cat` has them. Of tensors without bytes only the shape is wanted;
    there `torch.cat` would import torch's compiler first, which takes as long as importing torch itself."""
    first = parts[0]
    if first.is_meta:
        return first.new_empty((sum(len(p) for p in parts), *first.shape[1:]))
    return torch.cat(list(parts))


@dataclass(slots=True)
class CheckpointWeights:
    """Tensors of a checkpoint, converted as they are read."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: str
    taken: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        entry = self.checkpoint.tensors.get(name)
        if entry is None:
            raise ModelError(f"{self.checkpoint.folder}: tensor {name!r} of shape {shape} is missing")
        if entry.shape != shape:
            raise ModelError(f"{self.checkpoint.folder}: tensor {name!r} has shape {entry.shape}, expected {shape}")
        self.taken.add(name)
        return self.checkpoint.read(name).to(device=self.device, dtype=dtype or self.dtype)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        left = sorted(n for n in self.checkpoint.tensors if n not in self.taken and not n.startswith(ignored))
        if left:
            some = ", ".join(repr(n) for n in left[:5])
            raise ModelError(f"{self.checkpoint.folder}: {len(left)} tensors have no place in this model: {some}")


@dataclass(slots=True)
class RandomWeights:
    """Seeded random tensors of the asked shapes: a model of the right size without a checkpoint, for measurements."""

    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return (values / math.sqrt(shape[-1])).to(dtype or self.dtype)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        return None


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor that a model takes. `dtype` None: whichever the model runs in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(slots=True)
class ShapeWeights:
    """Tensors without bytes (on torch's meta device) and a record of what was asked for: a model's size from its family's
    own weight mapping, without a checkpoint."""

    dtype: torch.dtype
    taken: list[TensorShape] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """No: what a checkpoint may hold beside what its config says is not known."""
        return False

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.taken.append(TensorShape(name, shape, dtype))
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        return None
