"""What a server tells of the draft pools of its targets."""

from __future__ import annotations

from pilotfish.engine.targets.async_engine import Health
from pilotfish.server.observe.draft_pools import DraftPools, KnownPool


def pools_of(health: Health) -> DraftPools:
    """Of all targets that have said something."""
    statuses = [(replica.name, replica.status) for replica in health.replicas if replica.status is not None]
    return DraftPools([KnownPool(target, pool) for target, status in statuses for pool in status.pools])
