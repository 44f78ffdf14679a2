from collections.abc import Callable
from dataclasses import replace
from typing import Self

from torch import Tensor


class Tables:
    """A dataclass of tensors, of which some may be missing, of other such ones, and of plain values."""

    def tensors(self) -> tuple[Tensor, ...]:
        inner = (x.tensors() if isinstance(x, Tables) else (x,) for x in vars(self).values())
        return tuple(x for each in inner for x in each if isinstance(x, Tensor))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """In the order of `tensors`."""
        given = {name: x for name, x in vars(self).items() if isinstance(x, Tables | Tensor)}
        changed = {name: x.map(change) if isinstance(x, Tables) else change(x) for name, x in given.items()}
        return replace(self, **changed)  # type: ignore[type-var]

    @property
    def kind(self) -> object:
        """What there is besides the sizes of `tensors`."""
        plain = (x.kind if isinstance(x, Tables) else x for x in vars(self).values())
        return tuple(isinstance(x, Tensor) or x for x in plain)
