from collections.abc import Sequence

from msgspec import Struct

from pilotfish.engine.targets.replica import ReplicaHealth
from pilotfish.wire.serving import PoolLoad


class KnownPool(Struct, frozen=True):
    """A draft pool as one target knows it; another target may know it, too."""

    target: str
    pool: PoolLoad

    @property
    def acceptance(self) -> float | None:
        return self.pool.accepted / self.pool.verified if self.pool.verified else None

    @property
    def lateness(self) -> float | None:
        return self.pool.drops.get("late_nodes", 0) / self.pool.nodes if self.pool.nodes else None

    @property
    def state(self) -> str:
        if self.pool.refusal is not None:
            return "refuses"
        if not self.pool.ready:
            return "silent"
        return "busy" if self.pool.busy else "ready"


class DraftPools(Struct, frozen=True):
    data: list[KnownPool]
    object: str = "list"


def pools_of(replicas: Sequence[ReplicaHealth]) -> DraftPools:
    statuses = [(replica.name, replica.status) for replica in replicas if replica.status is not None]
    return DraftPools([KnownPool(target, pool) for target, status in statuses for pool in status.pools])


def draft_revisions(replicas: Sequence[ReplicaHealth]) -> dict[str, str]:
    return {known.pool.name: known.pool.revision for known in pools_of(replicas).data}
