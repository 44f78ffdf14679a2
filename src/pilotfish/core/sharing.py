"""Which tenant's rows a saturated draft grows."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


class FairShare:
    """Splits rows in proportion to weights, whenever more are wanted than there are; one that wants less than its share
    leaves the rest to others, and saves nothing up (start-time fair queueing: Goyal, Vin and Cheng 1996)."""

    def __init__(self) -> None:
        self._now = 0.0
        self._clocks: dict[str, float] = {}  # rows over weight, of the tenants that are ahead of `_now`

    def split(self, wanted: Mapping[str, int], weights: Mapping[str, float], rows: int) -> dict[str, int]:
        """Rows of each tenant in `wanted`."""
        if sum(wanted.values()) <= rows or len(wanted) == 1:  # nobody gets what another wants
            return {tenant: min(count, rows) for tenant, count in wanted.items()}
        shares = dict.fromkeys(wanted, 0)
        clocks = {tenant: self._clocks.get(tenant, self._now) for tenant, count in wanted.items() if count > 0}
        turns = [(clock, tenant) for tenant, clock in clocks.items()]
        heapq.heapify(turns)
        for _ in range(min(rows, sum(wanted.values()))):
            clock, tenant = heapq.heappop(turns)
            self._now = clock  # the least of all who want rows
            shares[tenant] += 1
            clocks[tenant] = clock + 1 / weights[tenant]
            if shares[tenant] < wanted[tenant]:
                heapq.heappush(turns, (clocks[tenant], tenant))
        self._clocks = {tenant: clock for tenant, clock in (self._clocks | clocks).items() if clock > self._now}
        return shares

    def charge(self, tenant: str, rows: int, weight: float) -> None:
        """`tenant` got rows beside those that were split."""
        if rows > 0:
            self._clocks[tenant] = self._clocks.get(tenant, self._now) + rows / weight
