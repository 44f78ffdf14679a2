"""Values that callers give, as plain Python: numpy's numbers and arrays stand for numbers and lists."""

from __future__ import annotations

import numpy as np


def plain(value: object) -> object:
    """One value: a numpy number or boolean becomes Python's, anything else stays."""
    return value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value


def plain_tuple(value: object) -> object:
    """A list, tuple or numpy array as a tuple of plain values; anything else stays."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
