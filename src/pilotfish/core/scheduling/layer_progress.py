"""How far a forward is, for those who take KV of its first layers while it computes on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class LayerProgress:
    """Layers whose KV is there for all rows of the forward at hand. Whoever computes counts in `written`; any thread
    may ask."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.written: NDArray[np.int32] = np.zeros(1, np.int32)
        self._began = self._seconds = 0.0

    def wrote(self, layer: int) -> None:
        """KV of this layer is in its slots, and that of those below it."""
        self.written[0] = layer + 1

    def hold(self, began: float, seconds: float) -> None:
        """The forward is held back to the pace of another device, which takes so long from `began` on: a layer is not
        there before that device has computed it."""
        self._began, self._seconds = began, seconds

    def reset(self) -> None:
        """No forward is at hand. To be called before anybody may ask about the next one."""
        self.written[0] = 0
        self._seconds = 0.0

    def at(self, now: float) -> int:
        written = int(self.written[0])
        if not self._seconds:
            return written
        return min(written, int(self.layers * (now - self._began) / self._seconds))
