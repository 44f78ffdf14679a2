"""Settings of speculation that benches compare: a mode, and the fields of an EngineConfig that mean something in it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from pilotfish.cli.bench.contestants import OFF, PLAIN, Contestant, always, budgets_of
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.workload import parse_choices, parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import BudgetKind, Mode, drafter_kinds
from pilotfish.engine.engine import Engine
from pilotfish.errors import ParameterError

#: What a setting of each mode says, in order of its name. The other fields mean nothing there.
FIELDS = {
    "sync": ("draft", "drafter", "levels", "width", "nodes", "budget"),
    "async": ("draft", "drafter", "leaves", "nodes", "budget", "cores"),
}
#: Of them, what an engine is loaded with. The others are changed between two runs.
LOADED = {"sync": ("draft",), "async": ("draft", "drafter", "leaves", "cores", "draft_cores")}


@dataclass(frozen=True)
class Setting:
    """One way to speculate, or off. `fields` are those of an EngineConfig."""

    name: str
    mode: Mode
    fields: Mapping[str, Any] = field(hash=False)

    def changes(self) -> dict[str, Any]:
        return {"mode": self.mode, **self.fields}

    def engine_config(self, base: EngineConfig) -> EngineConfig:
        """What the engine that it is played in is loaded with; off is played without any draft in the process."""
        if self.mode == OFF:
            return replace(base, mode=OFF, draft=None)
        loaded = {name: value for name, value in self.fields.items() if name in LOADED[self.mode]}
        return replace(base, mode=self.mode, **loaded)

    def contestant(self, engine: Engine) -> Contestant:
        """Over an engine of its `engine_config`."""
        if self.mode == OFF:
            return PLAIN
        changed = {name: value for name, value in self.fields.items() if name not in LOADED[self.mode]}
        config = replace(engine.config, **changed)
        drafter = engine.drafter if self.mode == "async" else engine.drafters.make(config.drafters, config.width)
        return Contestant(always(drafter), budgets_of(config, engine, drafter))

    def row(self) -> dict[str, Any]:
        shown = {name: str(value) if name == "draft" else value for name, value in self.fields.items()}
        return {"setting": self.name, "mode": self.mode, **shown}


def settings_of(mode: Mode, values: Mapping[str, Sequence[Any]]) -> Iterator[Setting]:
    """All over `values` of fields. A name says the mode and what differs within it."""
    names = FIELDS[mode]
    for chosen in product(*(dict.fromkeys(values[name]) for name in names)):
        fields = dict(zip(names, chosen, strict=True))
        differing = [word_of(name, value) for name, value in fields.items() if len(set(values[name])) > 1]
        own, theirs = fields.pop("cores", ("", ""))
        split = {"cores": own, "draft_cores": theirs} if own else {}
        yield Setting(" ".join((mode, ", ".join(differing))).strip(), mode, {**fields, **split})


def word_of(field: str, value: Any) -> str:
    if field == "cores":
        return f"cores {value[0]}:{value[1]}" if value[0] else "cores by rule"
    if field == "draft":
        return Path(value).name
    return f"{field} {value}" if field == "budget" else f"{value} {field}" if isinstance(value, int) else str(value)


def grid_of(options: BenchOptions) -> list[Setting]:
    """Off, and all settings that the options list. ParameterError for an entry that is none."""
    values: dict[str, Sequence[Any]] = {
        "draft": options.compared_drafts() if options.drafts else [options.models().draft],
        "drafter": _drafters(options.drafters),
        "levels": parse_numbers("levels", options.level_counts),
        "width": parse_numbers("width", options.widths),
        "nodes": parse_numbers("nodes", options.node_counts),
        "leaves": parse_numbers("leaves", options.leaf_counts),
        "budget": parse_choices("budget", options.budgets, get_args(BudgetKind)),
        "cores": [split_of(text) for text in options.splits.split()] or [("", "")],
    }
    modes = [mode for mode in parse_choices("modes", options.modes, get_args(Mode)) if mode != OFF]
    settings = [Setting(OFF, "off", {}), *(one for mode in modes for one in settings_of(mode, values))]
    base = options.engine_config()
    for setting in settings:
        replace(base, **setting.changes())  # which refuses what an engine does not take, before any is loaded
    return settings


def split_of(text: str) -> tuple[str, str]:
    own, colon, theirs = text.partition(":")
    if not (own and colon and theirs):
        raise ParameterError("cores", text, "TARGET:DRAFT, as in 0-5:6,7, joined by a space")
    return own, theirs


def even_splits() -> list[str]:
    """Of this process's cores an eighth, a quarter or half to the draft, the last ones; none of a single core."""
    cores = sorted(os.sched_getaffinity(0))
    counts = {max(1, len(cores) // part) for part in (8, 4, 2)} if len(cores) > 1 else set[int]()
    return [":".join(",".join(map(str, part)) for part in (cores[:-n], cores[-n:])) for n in sorted(counts)]


def _drafters(text: str) -> list[str]:
    for name in text.split(","):
        drafter_kinds(name)
    return text.split(",")
