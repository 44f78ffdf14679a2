"""The timeline of a result: the target's steps over what its draft does meanwhile, of off and the best of each mode."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from pilotfish.bench.charts import Axis, line, rect, svg, text
from pilotfish.bench.markup import tag
from pilotfish.bench.plots import Drawn, Plot
from pilotfish.bench.saved import OFF, DrawnStep, TimelineWindow

WIDTH, LEFT, RIGHT = 760, 84, 12
#: Heights of the rows of a setting, and of what is between two settings.
BAR, COMMITS, GAP = 16, 14, 14
KEYS = [
    ("hit", "verify: all sampled tokens were in the tree, which lives on"),
    ("miss", "verify: for some sequence the tree was lost"),
    ("plain", "verify without a tree that could live on"),
    ("level", "draft: a level"),
]


def timeline(drawn: Drawn, load: float) -> Plot | None:
    """Some steps at one load, all settings on one scale of time."""
    windows = [one for one in _best_of_modes(drawn, load) if one.steps]
    if not windows:
        return None
    seconds = max(one.steps[-1].ended for one in windows)
    round_ticks = Axis.up_to("milliseconds", 1000 * seconds).ticks
    axis = Axis("milliseconds", 0.0, 1000 * seconds, [tick for tick in round_ticks if tick <= 1000 * seconds])
    parts, top = list[Element](), 6.0
    for window in windows:
        parts += _lane(window, axis, top)
        top += _height(window) + GAP
    grid = [line(_at(axis, tick), 0, _at(axis, tick), top, "grid") for tick in axis.ticks]
    labels = [text(_at(axis, tick), top + 14, f"{tick:g}", "middle") for tick in axis.ticks]
    words = text(
        LEFT + (WIDTH - LEFT - RIGHT) / 2, top + 30, "milliseconds since the window's first step", "middle", "label"
    )
    chart = svg(
        "Steps of the target over levels of the draft, off first", WIDTH, top + 36, *grid, *labels, *parts, words
    )
    columns = [
        "setting",
        "step began (ms)",
        "verify (ms)",
        "sequences",
        "nodes verified",
        "depth",
        "accepted",
        "committed",
        "hits",
    ]
    rows = [_row(window.setting, step) for window in windows for step in window.steps]
    return Plot("Timeline of target and draft", _takeaway(windows), [chart], columns, rows,
                "A number above the end of a step is how many tokens it committed.", KEYS, wide=True)  # fmt: skip


def _best_of_modes(drawn: Drawn, load: float) -> list[TimelineWindow]:
    """Off's window, and that of the quickest setting of each other mode, which is the first word of its name."""
    speeds = {one.setting: one.speed for one in drawn.result.settings if one.load == load}
    best: dict[str, TimelineWindow] = {}
    for window in (one for one in drawn.result.windows if one.concurrency == load):
        mode = window.setting.split()[0]
        if mode not in best or speeds.get(window.setting, 0) > speeds.get(best[mode].setting, 0):
            best[mode] = window
    return sorted(best.values(), key=lambda one: one.setting != OFF)


def _lane(window: TimelineWindow, axis: Axis, top: float) -> list[Element]:
    verify, draft = top + COMMITS, top + COMMITS + BAR + 3
    parts = [
        text(0, verify + 12, window.setting.split()[0], "start", "label"),
        text(LEFT - 6, verify + 12, "target", "end"),
    ]
    for step in window.steps:
        right = _at(axis, 1000 * step.ended)
        parts.append(_bar(axis, step.forward, step.ended, verify, _kind(window, step), _told(step)))
        parts += [line(right, top + 4, right, verify + BAR, "commit")] if step.committed else []
        parts += [text(right - 3, verify - 2, str(step.committed), "end")] if step.committed else []
    if not _drafts(window):
        return parts
    parts.append(text(LEFT - 6, draft + 12, "draft", "end"))
    parts += [_bar(axis, o.began, o.ended, draft, "level", f"a level of {o.leaves} leaves") for o in window.levels]
    in_step = [] if window.levels else [one for one in window.steps if one.nodes]
    parts += [_bar(axis, one.planned, one.drafted, draft, "level", f"{one.offered} nodes drafted") for one in in_step]
    return parts


def _bar(axis: Axis, began: float, ended: float, top: float, style: str, words: str) -> Element:
    left, right = max(_at(axis, 1000 * began), LEFT), min(_at(axis, 1000 * ended), WIDTH - RIGHT)
    return rect(left, top, max(right - left - 0.8, 0.5), BAR, f"bar {style}", tag("title", words))


def _at(axis: Axis, milliseconds: float) -> float:
    return LEFT + axis.share(milliseconds) * (WIDTH - LEFT - RIGHT)


def _kind(window: TimelineWindow, step: DrawnStep) -> str:
    """In sync no tree lives on, whatever was in it."""
    if not window.levels:
        return "plain"
    return "hit" if step.hits == step.sequences else "miss"


def _drafts(window: TimelineWindow) -> bool:
    return bool(window.levels) or any(step.nodes for step in window.steps)


def _height(window: TimelineWindow) -> float:
    return COMMITS + BAR + (BAR + 3 if _drafts(window) else 0)


def _told(step: DrawnStep) -> str:
    return f"{step.nodes} nodes verified, {step.accepted} accepted, {step.committed} committed, {step.hits} hits"


def _row(setting: str, step: DrawnStep) -> list[str]:
    counts = (step.sequences, step.nodes, step.depth, step.accepted, step.committed, step.hits)
    return [setting, f"{1000 * step.began:.2f}", f"{1000 * (step.ended - step.forward):.2f}", *map(str, counts)]


def _takeaway(windows: list[TimelineWindow]) -> str:
    counts = {one.setting: sum(step.committed for step in one.steps) for one in windows}
    told = ", ".join(f"{name.split()[0]} {count}" for name, count in counts.items())
    return f"Tokens committed in the same stretch of time: {told}."
