import sys
from collections.abc import Iterable
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import asdict

from pilotfish.operate.contrast import Count
from pilotfish.operate.outcome import RequestOutcome

#: Cells of a window; further ones are merged into one whose dimensions are all OTHER.
MAX_CELLS = 256
#: Cells of all windows, about a kilobyte each; beyond it the oldest windows are dropped.
TOTAL_CELLS = 1 << 16
WINDOW_SECONDS = 60.0
#: Windows of a day.
KEPT_WINDOWS = 24 * 60
OTHER = "other"


class CellKey(Struct, frozen=True, kw_only=True):
    """The dimensions of `Cohort`, and the variant. OTHER in all: requests that found no room."""

    variant: str = OTHER
    tag: str = OTHER
    output: str = OTHER
    temperature: str = OTHER
    context: str = OTHER
    script: str = OTHER
    client: str = OTHER
    draft: str = OTHER

    @classmethod
    def of(cls, outcome: RequestOutcome) -> "CellKey":
        values = {name: sys.intern(value) for name, value in asdict(outcome.cohort).items()}
        return cls(variant=sys.intern(outcome.variant), **values)


DIMENSIONS = CellKey.__struct_fields__


class Cell(Struct, kw_only=True, omit_defaults=True):
    """Sums over requests that gave tokens; fields of the same name are those of `RequestOutcome`. Those that ran
    without guesses because their variant was cut say nothing of drafts: they are in `cut` alone."""

    key: CellKey
    requests: Count = 0
    cut: Count = 0  # requests
    tokens: Count = 0
    steps: Count = 0
    trees: Count = 0
    late: Count = 0
    nodes: Count = 0
    accepted: Count = 0
    guessable: Count = 0
    sharing: Count = 0
    accepted_squared: Count = 0  # of the squares of each request's, for the variance of accepted tokens a step
    accepted_steps: Count = 0  # of the products accepted · steps
    steps_squared: Count = 0
    tried_by_depth: list[Count] = []
    accepted_by_depth: list[Count] = []

    def take(self, outcome: RequestOutcome) -> None:
        if outcome.cut:
            self.cut += 1
            return
        self.requests += 1
        for name in OF_OUTCOMES:
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        self.accepted_squared += outcome.accepted**2
        self.accepted_steps += outcome.accepted * outcome.steps
        self.steps_squared += outcome.steps**2
        self._deepen(outcome)

    def merge(self, other: "Cell") -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._deepen(other)

    def _deepen(self, other: "RequestOutcome | Cell") -> None:
        for name in BY_DEPTH:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)])


OF_OUTCOMES = ("tokens", "steps", "trees", "late", "nodes", "accepted", "guessable", "sharing")
SUMS = ("requests", "cut", *OF_OUTCOMES, "accepted_squared", "accepted_steps", "steps_squared")
BY_DEPTH = ("tried_by_depth", "accepted_by_depth")


class CohortWindow(Struct, frozen=True, kw_only=True):
    """Requests that ended from `begin` on; all windows are equally long."""

    begin: float  # seconds since the epoch
    cells: list[Cell]


class CohortStatistics(Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/rollout/statistics`."""

    now: float  # seconds since the epoch, by the server's clock
    windows: list[CohortWindow]

    def between(self, begin: float, end: float) -> list[Cell]:
        return merged(cell for one in self.windows if begin <= one.begin < end for cell in one.cells)


def merged(cells: Iterable[Cell]) -> list[Cell]:
    found: dict[CellKey, Cell] = {}
    for cell in cells:
        found.setdefault(cell.key, Cell(key=cell.key)).merge(cell)
    return list(found.values())


class CohortWindows:
    """The newest ones. For one thread."""

    def __init__(self) -> None:
        self._windows: dict[int, dict[CellKey, Cell]] = {}
        self._cells = 0

    def add(self, outcome: RequestOutcome) -> None:
        if outcome.steps == 0:
            return
        window = self._windows.setdefault(int(outcome.ended // WINDOW_SECONDS), {})
        key = CellKey.of(outcome)
        if key not in window and len(window) >= MAX_CELLS - 1:
            key = CellKey()
        if key not in window:
            window[key] = Cell(key=key)
            self._cells += 1
        window[key].take(outcome)
        while len(self._windows) > KEPT_WINDOWS or self._cells > TOTAL_CELLS:
            self._cells -= len(self._windows.pop(min(self._windows)))

    def told(self, now: float) -> CohortStatistics:
        """Oldest window first. The cells stay live: encode them before the next `add`."""
        windows = [
            CohortWindow(begin=number * WINDOW_SECONDS, cells=list(cells.values()))
            for number, cells in sorted(self._windows.items())
        ]
        return CohortStatistics(now=now, windows=windows)
