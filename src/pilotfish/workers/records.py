"""Records of a target's steps, a draft's levels, and a prefill worker's forwards, in seconds of one host's monotonic
clock. Timelines are JSON in the Trace Event Format (Google, 2016), which Perfetto opens. A process streams events into
a part, one a line, so a killed process leaves all so far. A host's parts are merged at the end."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.core.prefilling.prefill_orders import TakenOrder

#: Events of one part. About 150 bytes each.
MAX_EVENTS = 1 << 20


class StepRecord(msgspec.Struct, frozen=True):
    """A step of the target, from one moment to the next:

    before  began   planned  drafted  scheduled  prepared  computed  verified  ended
    ─ waiting ─ plan ─── draft ── schedule ── rows ─── forward ── verify ── send ─
    """

    before: float  # when the step before ended
    began: float
    planned: float
    drafted: float
    scheduled: float
    prepared: float
    computed: float
    verified: float
    ended: float
    sequences: int  # that sampled
    rows: int
    nodes: int  # of them, of trees
    depth: int  # of the deepest tree
    offered: int  # nodes in the trees before the budget's choice
    accepted: int  # nodes
    committed: int  # tokens
    hits: int  # sequences whose bonus token was in a tree that lives on

    @property
    def misses(self) -> int:
        return self.sequences - self.hits

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        names = ("waiting", "plan", "draft", "schedule", "rows", "forward", "verify", "send")
        moments = msgspec.structs.astuple(self)[: len(names) + 1]
        return dict(zip(names, pairwise(moments), strict=True))


@dataclass(frozen=True)
class LevelRecord:
    began: float
    ended: float
    sessions: int
    leaves: int
    prompt_rows: int
    nodes: int  # added
    used: int  # nodes committed since the level before
    wasted: int  # nodes dropped since the level before


@dataclass(frozen=True)
class PrefillRecord:
    began: float
    ended: float
    handovers: int  # that had rows in it
    rows: int
    completed: int  # hand-overs that had their last row in it


class Timeline:
    def __init__(self, path: Path, process: str) -> None:
        self._file = path.open("wb")
        self._pid = os.getpid()
        self._encoder = msgspec.json.Encoder()
        self._left = MAX_EVENTS
        self._leases = 0  # so far
        self._put({"name": "process_name", "ph": "M", "args": {"name": process}})

    def step(self, record: StepRecord) -> None:
        counts = {
            name: getattr(record, name)
            for name in ("sequences", "rows", "nodes", "depth", "offered", "accepted", "committed", "hits", "misses")
        }
        self._span("step", record.began, record.ended, counts)
        for name, (began, ended) in record.parts.items():
            if name != "waiting":
                self._span(name, began, ended, {})

    def forward(self, record: LevelRecord | PrefillRecord, taken: float | None = None) -> None:
        """`taken`: seconds that it took by itself, without being held back to its pace."""
        name = "level" if isinstance(record, LevelRecord) else "prefill"
        counts = {key: value for key, value in vars(record).items() if key not in ("began", "ended")}
        self._span(name, record.began, record.ended, counts if taken is None else {**counts, "taken": taken})

    def lease(self, order: TakenOrder) -> None:
        """All of it is free again."""
        assert order.ended is not None
        self._leases += 1
        started = order.ended if order.started is None else order.started
        computed = order.ended if order.computed is None else order.computed
        facts = {"tokens": len(order.tokens), "cached": order.cached, "size": order.size, "outcome": order.outcome}
        self._of_lease("b", "lease", order.ordered, facts)
        for name, began, ended in (("queued", order.ordered, started), ("computing", started, computed)):
            if began < ended:
                self._of_lease("b", name, began, {})
                self._of_lease("e", name, ended, {})
        self._of_lease("e", "lease", order.ended, {})

    def close(self) -> None:
        self._file.close()

    def _of_lease(self, phase: str, name: str, at: float, facts: Mapping[str, Any]) -> None:
        self._put({"name": name, "cat": "lease", "id": self._leases, "ph": phase, "ts": 1e6 * at, "args": facts})

    def _span(self, name: str, began: float, ended: float, counts: Mapping[str, float]) -> None:
        self._put({"name": name, "ph": "X", "ts": 1e6 * began, "dur": 1e6 * (ended - began), "args": counts})

    def _put(self, event: dict[str, Any]) -> None:
        if self._left > 0 and not self._file.closed:
            self._left -= 1
            self._file.write(self._encoder.encode({**event, "pid": self._pid, "tid": self._pid}) + b"\n")


def part_of(path: Path, process: str) -> Path:
    return path.with_name(f"{path.name}.{process.replace(' ', '-')}.part")


def merge(parts: Sequence[Path], path: Path) -> None:
    found = [part for part in parts if part.is_file()]
    with path.open("wb") as file:
        file.write(b'{"traceEvents":[\n')
        for i, line in enumerate(_lines(found)):
            file.write(b",\n" + line if i else line)
        file.write(b"\n]}\n")
    for part in found:
        part.unlink()


def _lines(parts: Iterable[Path]) -> Iterable[bytes]:
    for part in parts:
        with part.open("rb") as file:
            yield from (line.rstrip() for line in file if line.endswith(b"}\n"))  # the last one may be cut off
