"""What one side tells the other of frames that were of no use: seldom, and by the name of the rule that was broken."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish.core.drafting.messages import MAX_TEXT, Error

#: Rules of which a side may be told that it broke them.
CODES = {
    "malformed": "the frame is no message",
    "unknown_type": "the message is of a type that is not known here: it was ignored",
    "ids": "ids of nodes rise within a Tree, and from Tree to Tree of a generation",
    "base_len": "a Tree's base_len is not above the target's tokens, nor below that of the Tree before it",
    "vocabulary": "tokens of nodes are below vocab_size",
    "room": "a session has no more nodes than the target holds, about twice `wanted`",
    "gap": "Trees of a generation are numbered from 0 on, without gaps",
    "version": "a version is chosen from the range that Hello tells of",
}
#: Seconds between two Errors of a code.
PERIOD = 1.0


@dataclass
class _Told:
    at: float
    untold: int = 0


class ErrorReports:
    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def of(self, code: str, about: str, reason: str, now: float, session: int = 0, generation: int = 0) -> Error | None:
        """What to tell now of a frame that broke the rule `code` of CODES; None: later, in sum."""
        told = self._told.get(code)
        if told is not None and now - told.at < PERIOD:
            told.untold += 1
            return None
        count = 1 if told is None else 1 + told.untold
        self._told[code] = _Told(now)
        return Error(code, about[:MAX_TEXT], reason[:MAX_TEXT], count, session, generation)
