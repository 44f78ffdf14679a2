"""Phases follow each other. A running phase's speed is measured; a later one's is planned, or that of its namesake."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from rich import progress as columns
from rich.console import Console
from rich.progress import Progress, Task
from rich.text import Text

from pilotfish.printable import one_line

SHOWN_AFTER = 2.0  # seconds of a phase: shorter ones are worth no bar and no line
ESTIMATED_AFTER = 5.0  # seconds of a phase that was planned
EVERY = 30.0  # seconds between lines
LOOKED_AT_EVERY = 0.5  # seconds
SPEED_OVER = 600.0  # seconds: a step may take minutes

#: Called with the number of units done, by default 1, and maybe with a `note` about them.
Advance: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class PlannedPhase:
    name: str
    units: float  # left to do
    seconds: float | None = None  # of a unit, where it was measured


@dataclass(frozen=True)
class PhaseToGo:
    name: str
    seconds: float | None  # None: unknown


class PhaseProgress(Progress):
    """Without a terminal it prints a line for phases of two seconds or more, and another one every half minute."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        transient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`transient`, for short works: the bar disappears at the end, and the first line comes after half a minute."""
        console = Console(stderr=True) if console is None else console
        super().__init__(
            columns.TextColumn("{task.description}", markup=False),
            columns.BarColumn(),
            columns.MofNCompleteColumn(),
            columns.TimeElapsedColumn(),
            columns.TimeRemainingColumn(),
            console=console,
            speed_estimate_period=SPEED_OVER,
            transient=transient,
            redirect_stdout=False,
            redirect_stderr=console.stderr,  # what others write to it would go to a console on stdout
            get_time=clock,
            disable=not console.is_terminal,
        )
        self._first_after = EVERY if transient else SHOWN_AFTER
        self._planned: list[PlannedPhase] = []
        self._estimated = False
        self._told: Task | None = None
        self._told_at = clock()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="progress", daemon=True)

    def start(self) -> None:
        self._watcher.start()

    def stop(self) -> None:
        self._over.set()
        self._watcher.join()
        if not self.live.transient:
            self.tell(last=True)
        if self.live.is_started:
            super().stop()

    def plan(self, *phases: PlannedPhase) -> None:
        """The phases to come, in order. A skipped phase is dropped when a later one begins."""
        self._planned = list(phases)

    @contextmanager
    def phase(self, name: str, total: float | None = None, unit: str = "", done: int = 0) -> Iterator[Advance]:
        task = self.begin(name, total, unit, done)
        try:
            yield partial(self._advance, task)
        finally:
            self.update(task.id, visible=total is not None)
            self.stop_task(task.id)

    def begin(self, name: str, total: float | None = None, unit: str = "", done: int = 0) -> Task:
        fields: dict[str, Any] = {"name": name, "unit": unit, "planned": self._taken_from_plan(name)}
        self.add_task(name, total=total, completed=done, **fields)
        return self.tasks[-1]

    def _taken_from_plan(self, name: str) -> PlannedPhase | None:
        names = [phase.name for phase in self._planned]
        if name not in names:
            return None
        *_, phase = self._planned[: names.index(name) + 1]
        del self._planned[: names.index(name) + 1]
        return phase

    def _advance(self, task: Task, units: float = 1, note: str = "") -> None:
        name = task.fields["name"]
        self.update(task.id, advance=units, description=f"{name} · {note}" if note else name)

    def _watch(self) -> None:
        if not self._over.wait(SHOWN_AFTER):
            super().start()
        while not self._over.wait(LOOKED_AT_EVERY):
            self.tell()

    def tell(self, *, last: bool = False) -> None:
        for line in self._due(last):
            self.console.print(Text(one_line(line)), soft_wrap=True)

    def _due(self, last: bool) -> Iterator[str]:
        task = next((one for one in reversed(self.tasks) if one.stop_time is None), None)
        if task is None:
            return
        now, took, phases = self.get_time(), task.elapsed or 0.0, self._to_go(task)
        known = task.fields["planned"] is not None and phases[0].seconds is not None
        if known and not self._estimated and took >= ESTIMATED_AFTER:
            self._estimated = True
            yield _estimate(phases)
        first = task is not self._told and took >= self._first_after
        if self.disable and (last or first or now - self._told_at >= EVERY):
            self._told, self._told_at = task, now
            yield _line(task, phases)

    def _to_go(self, task: Task) -> list[PhaseToGo]:
        units, planned = task.remaining, task.fields["planned"]
        running = None if units is None else self._seconds(task.fields["name"], units, planned)
        following = [PhaseToGo(one.name, self._seconds(one.name, one.units, one)) for one in self._planned if one.units]
        return [PhaseToGo(task.fields["name"], running), *following]

    def _seconds(self, name: str, units: float, planned: PlannedPhase | None) -> float | None:
        speeds = [task.speed for task in self.tasks if task.fields["name"] == name and task.speed]
        if speeds:
            return units / speeds[-1]
        return None if planned is None or planned.seconds is None else units * planned.seconds


def _line(task: Task, phases: Sequence[PhaseToGo]) -> str:
    (running, *following), took = phases, about(task.elapsed or 0.0)
    said = [_rate(task.speed) if task.speed else f"{took} so far"]
    if task.total is not None:
        said.insert(0, f"{task.completed:,.0f} of {task.total:,.0f} {task.fields['unit']}".strip())
    if running.seconds is None:
        return f"{task.description}: {', '.join(said)}"
    if running.seconds:
        said.append(f"about {about(running.seconds)} left")
    if any(one.seconds is not None for one in following):
        said.append(f"{_together(phases)} with what follows")
    return f"{task.description}: {', '.join(said)}{_unmeasured(following)}"


def _estimate(phases: Sequence[PhaseToGo]) -> str:
    measured = [f"{one.name} {about(one.seconds)}" for one in phases if one.seconds is not None]
    return f"at this pace about {_together(phases)} to go: {', '.join(measured)}{_unmeasured(phases)}"


def _together(phases: Sequence[PhaseToGo]) -> str:
    return about(sum(one.seconds or 0.0 for one in phases))


def _unmeasured(phases: Sequence[PhaseToGo]) -> str:
    names = dict.fromkeys(one.name for one in phases if one.seconds is None)
    return f" (not measured yet: {', '.join(names)})" if names else ""


def _rate(speed: float) -> str:
    if speed < 1:
        return f"{1 / speed:.3g} s each"
    return f"{speed:,.0f} a second" if speed >= 100 else f"{speed:.3g} a second"


def about(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"
