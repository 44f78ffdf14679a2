"""Which features a target sends next to its pools, and the frames that hold them.

    position          0 ..... sent ........ computed ...
    features of       [ told ][ due ]
    a session

A step's few rows go before its Commit, as the draft waits for them. A prompt, or a sequence that was opened anew,
catches up piece by piece after all Commits: so many bytes a step, and only while little is on the way to its pool.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from pilotfish.core.cache.slots import Slots
from pilotfish.core.drafting.messages import FeatureRows
from pilotfish.core.features.feature_rows import ITEM_BYTES, CodedRows, FeatureType

#: Rows of a session up to which they are no backlog.
FRESH = 64
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
