"""Which features a target sends next to its pools, the frames that hold them, and their use at a draft.

    position          0 ..... sent ........ computed ...
    features of       [ told ][ due ]
    a session

A step's few rows go before its Commit, as the draft waits for them. A prompt, or a sequence that was opened anew,
catches up piece by piece after all Commits: so many bytes a step, and only while little is on the way to its pool.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from pilotfish.core.cache.slots import Slots
from pilotfish.core.drafting.draft_sessions import DraftSession, SessionTable
from pilotfish.core.drafting.messages import FeatureOffer, FeatureRows
from pilotfish.core.features.features import FEATURE_TYPES, ITEM_BYTES, CodedRows, FeatureType, decoded_rows
from pilotfish.errors import WireError

FRESH = 64  # rows of a session up to which they are no backlog
#: Bytes of backlog that go out in a step: of a session, and of all together.
SESSION_BYTES, STEP_BYTES = 1 << 19, 1 << 20
#: Bytes of backlog on the way to a pool at which no more goes to it, and seconds after which they are taken for lost,
#: as losses are never answered. A step's own rows do not count: many sequences have as much on the way at any time.
WINDOW, LOST_AFTER = 8 << 20, 1.0
#: Why a frame is of no use to a draft. Healthy targets cause only `stale` ones.
FEATURE_DROPS = {
    "damaged": "its digest is not that of its content",
    "misshapen": "it holds no whole rows of the width that was agreed on",
    "stale": "its session was closed, rests without KV, or is of another generation",
    "beyond": "its sequence cannot get so long here",
    "full": "so many features of this tenant wait for their rows already",
}


@dataclass(frozen=True)
class FeaturePiece:
    session: int
    generation: int
    first: int
    slots: Slots
    fresh: bool


class _Unanswered(NamedTuple):
    number: int  # of the frame
    size: int
    sent: float


@dataclass
class FeatureLine:
    frames: int = 0  # sent
    size: int = 0  # bytes of their rows and scales
    under_way: int = 0  # of backlog
    _unanswered: deque[_Unanswered] = field(default_factory=deque)

    def send(self, frame: FeatureRows, now: float, *, fresh: bool) -> FeatureRows:
        size = len(frame.rows) + len(frame.scales)
        self.frames += 1
        self.size += size
        if not fresh:
            self.under_way += size
            self._unanswered.append(_Unanswered(self.frames, size, now))
        return replace(frame, number=self.frames)

    def came(self, number: int) -> None:
        """The pool has received that frame; those before it have come, or are lost."""
        while self._unanswered and self._unanswered[0].number <= number:
            self.under_way -= self._unanswered.popleft().size

    def has_room(self, now: float) -> bool:
        while self._unanswered and now - self._unanswered[0].sent > LOST_AFTER:
            self.under_way -= self._unanswered.popleft().size
        return self.under_way < WINDOW


def frames_of(pieces: Sequence[FeaturePiece], rows: CodedRows, kind: FeatureType) -> list[FeatureRows]:
    """`rows` are those of all pieces, one after the other. The frames have no numbers yet."""
    frames, used = [], 0
    for piece in pieces:
        own, used = rows.span(used, used + len(piece.slots)), used + len(piece.slots)
        data, scales = own.rows.tobytes(), own.scales.tobytes()
        frame = FeatureRows(piece.session, piece.generation, 1, piece.first, kind, data, b"", scales)
        frames.append(replace(frame, digest=frame.digested()))
    return frames


def row_bytes(width: int, kind: FeatureType) -> int:
    return width * ITEM_BYTES[kind]


COUNTING = 0.05  # seconds between two counts of the rows of a tenant at its limit
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
        """One of FEATURE_DROPS if the frame is of no use."""
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
