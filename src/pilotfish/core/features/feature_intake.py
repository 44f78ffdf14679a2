"""A draft's side of features: which it needs, and the use of the frames that hold them."""

from collections import Counter
from dataclasses import dataclass

from pilotfish.core.drafting.draft_sessions import DraftSession, SessionTable
from pilotfish.core.drafting.messages import FeatureOffer, FeatureRows
from pilotfish.core.features.feature_rows import FEATURE_TYPES, decoded_rows
from pilotfish.errors import WireError

#: Seconds between two counts of the rows of a tenant at its limit.
COUNTING = 0.05
#: How a target of this program would offer the right features.
_RIGHT = "it must be started with --features and this draft's head"


@dataclass(frozen=True)
class FeatureNeed:
    digests: tuple[str, ...]  # of the projection that makes them; several where it was published in several ways
    width: int
    target: str = ""  # digest of the embedding of the target that makes them; "": not known

    def mismatch(self, offer: FeatureOffer | None) -> str | None:
        known_by = " or ".join(digest[:12] for digest in self.digests)
        need = f"this draft needs features of {self.width} numbers, projection {known_by}"
        if offer is None:
            return f"{need}; the target offers none: {_RIGHT}"
        if offer.digest not in self.digests or offer.width != self.width:
            return f"{need}; the target offers {offer.width} numbers, projection {offer.digest[:12]}: {_RIGHT}"
        if offer.dtype not in FEATURE_TYPES:
            return f"{need} as one of {', '.join(FEATURE_TYPES)}; the target sends {offer.dtype[:24]}"
        return None


class FeatureIntake:
    """Puts features into sessions' logs: of all tenants about as many as there are slots, in equal shares."""

    def __init__(self, need: FeatureNeed, table: SessionTable) -> None:
        self.need = need
        self._table = table
        #: Of tenants that had sessions at the last count of any: rows that one may have beside those that it had when
        #: its own were counted, and when that was.
        self._left = Counter[str]()
        self._counted: dict[str, float] = {}

    def take(self, session: DraftSession | None, message: FeatureRows, now: float) -> str | None:
        """One of `feature_sending.FEATURE_DROPS` if the frame is of no use."""
        if session is None or session.generation != message.generation or session.evicted:
            return "stale"
        if message.digest != message.digested():
            return "damaged"
        try:
            rows = decoded_rows(message.rows, message.scales, message.dtype, self.need.width)
        except WireError:
            return "misshapen"
        assert session.features is not None
        if message.first + len(rows) > session.max_length:
            return "beyond"
        if not self._has_room(session.tenant, len(rows), now):
            return "full"
        session.features.put(message.first, rows)
        session.touched = now
        return None

    def _has_room(self, tenant: str, count: int, now: float) -> bool:
        """Counts sessions only when the tenant has had as many rows as it may have since the last count."""
        if self._left[tenant] < count and now - self._counted.get(tenant, -COUNTING) >= COUNTING:
            self._count(tenant, now)
        if self._left[tenant] < count:
            return False
        self._left[tenant] -= count
        return True

    def _count(self, tenant: str, now: float) -> None:
        """Forgets tenants without a session: without keys each target that ever came would be one."""
        present = {session.tenant for session in self._table}
        for gone in self._counted.keys() - present:
            del self._left[gone], self._counted[gone]
        logs = (session.features for session in self._table if session.tenant == tenant)
        self._left[tenant] = self._table.pool.capacity // len(present) - sum(
            len(log) for log in logs if log is not None
        )
        self._counted[tenant] = now
