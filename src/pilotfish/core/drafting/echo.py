"""How long messages are on their way, as either side of a connection measures it.

    target    sent ─────────────┐             ┌──► now
    draft                       └─► held ─────┘ sent, heard, held      round trip = now - heard - held

No clock is compared with the other side's. What the message waits for on arrival, a forward perhaps, counts as its way,
so the least of the last round trips is taken (RFC 5905, clock filter), and half of it for one way.
"""

from __future__ import annotations

from collections import deque

from pilotfish.core.drafting.messages import Echo

#: Round trips that are remembered.
KEPT = 16


class EchoClock:
    def __init__(self) -> None:
        self._heard: int | None = None
        self._heard_at = 0.0
        self._round_trips = deque[float](maxlen=KEPT)

    def stamp(self, now: float) -> Echo:
        held = 0 if self._heard is None else max(round((now - self._heard_at) * 1e6), 0)
        return Echo(_microseconds(now), self._heard, held)

    def hear(self, echo: Echo | None, now: float) -> None:
        if echo is None:
            return
        self._heard, self._heard_at = echo.sent, now
        if echo.heard is not None and (passed := _microseconds(now) - echo.heard - echo.held) >= 0:
            self._round_trips.append(passed / 1e6)

    @property
    def delay(self) -> float | None:
        """Seconds one way; None until a message came back."""
        return min(self._round_trips) / 2 if self._round_trips else None


def _microseconds(now: float) -> int:
    return max(round(now * 1e6), 0) % (1 << 53)
