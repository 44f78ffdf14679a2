"""The draft pools of a server's targets, as `GET /v1/drafts` tells of them."""

from __future__ import annotations

from msgspec import Struct

from pilotfish.wire.serving import PoolLoad


class KnownPool(Struct, frozen=True):
    """A draft pool as one target knows it; another target may know it, too."""

    target: str
    pool: PoolLoad

    @property
    def acceptance(self) -> float | None:
        """Share of its verified nodes that were accepted; None while none was verified."""
        return self.pool.accepted / self.pool.verified if self.pool.verified else None

    @property
    def lateness(self) -> float | None:
        """Share of its nodes that came when they were of no use any more."""
        return self.pool.drops.get("late_nodes", 0) / self.pool.nodes if self.pool.nodes else None

    @property
    def state(self) -> str:
        """One word for how it is."""
        if self.pool.refusal is not None:
            return "refuses"
        if not self.pool.ready:
            return "silent"
        return "busy" if self.pool.busy else "ready"


class DraftPools(Struct, frozen=True):
    data: list[KnownPool]
    object: str = "list"
