"""Replicas that this process is told of: Ray's routers (`alpha.TellingRouter`) tell, a `Listing` listens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish.engine.targets.members import Member


@dataclass(frozen=True)
class Listed:
    id: str
    host: str  # Ray's id of it
    about: Mapping[str, Any]  # what it said once it was ready
    load: Mapping[str, Any]  # what it last said

    @property
    def member(self) -> Member:
        return Member(self.about["endpoint"], self.about["key"], self.about["name"])


Listener = Callable[[Sequence[Listed]], None]
#: By application; called on a thread of Ray's router, which keeps no state of its own.
LISTENERS: dict[str, Listener] = {}
