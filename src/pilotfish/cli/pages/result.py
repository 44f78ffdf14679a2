"""A result as one page."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element

from pilotfish.cli.pages.document import Child, table, tag, whole_page
from pilotfish.cli.pages.result_plots import Drawn, Plot, acceptance_by_depth, latencies, speedups
from pilotfish.cli.pages.saved_result import OFF, SavedResult


def page(result: SavedResult) -> str:
    drawn = Drawn.of(result)
    title = f"Speculation, measured: {_models(result)}" if result.target else f"Served: {result.model or 'a model'}"
    body = tag("main", *_heading(drawn, title), _legend(drawn), *_sections(drawn), _conditions(result))
    return whole_page(title, body)


def _models(result: SavedResult) -> str:
    models = [model for model in (result.target, result.draft) if model not in (None, "", "None")]
    return " with ".join("/".join(Path(str(model)).parts[-2:]) for model in models)


def _heading(drawn: Drawn, title: str) -> list[Element]:
    result, parts = drawn.result, [tag("h1", title)]
    if result.pace:
        words = f"{result.pace}. Times are those of emulated devices; tokens and acceptance are real."
        parts.append(tag("p", tag("b", "Paced: "), words, class_="notice"))
    if result.invalid:
        words = f"{result.invalid}. No speed on this page is that of the devices."
        parts.append(tag("p", tag("b", "Invalid: "), words, class_="alarm"))
    if OFF not in drawn.styles:
        parts.append(tag("p", "Off was not measured here: no speed-up can be told.", class_="notice"))
    unequal = [one for one in result.settings if one.equal_outputs is not None and one.equal_outputs < 1]
    if unequal:
        worst = min(unequal, key=lambda one: one.equal_outputs or 0.0)
        words = f"{1 - (worst.equal_outputs or 0.0):.1%} of the outputs of {worst.setting} differ from those of off"
        exact = result.dtype == "float32"
        why = "; in float32 none may." if exact else f", as {result.dtype or 'rounded'} sums of other shapes may."
        parts.append(tag("p", words + why, class_="alarm" if exact else "notice"))
    elif any(one.equal_outputs is not None for one in result.settings):
        parts.append(tag("p", "Every output equals that of off, token by token.", class_="good"))
    return parts


def _legend(drawn: Drawn) -> Element:
    entries = [tag("span", tag("i", class_=f"swatch {style}"), name) for name, style in drawn.styles.items()]
    missing = len(drawn.result.names) - len(drawn.styles)
    more = [tag("span", f"and {missing} more in the tables")] if missing else []
    return tag("nav", *entries, *more, class_="legend")


def _sections(drawn: Drawn) -> list[Element]:
    loads = drawn.result.loads
    sections = [tag("div", *(_section(plot) for plot in speedups(drawn)), class_="plots")]
    for load in loads:
        parts = [_section(plot) for plot in (latencies(drawn, load), acceptance_by_depth(drawn, load)) if plot]
        words = drawn.at(load)
        if parts and len(loads) > 1:
            summary = tag("summary", tag("h2", words[0].upper() + words[1:]))
            opened = "" if load == loads[0] else None
            sections.append(tag("details", summary, tag("div", *parts, class_="plots"), class_="load", open=opened))
        else:
            sections.append(tag("div", *parts, class_="plots"))
    return sections


def _section(plot: Plot) -> Element:
    notes = [tag("p", plot.note)] if plot.note else []
    style = "charts" if len(plot.charts) > 1 else "chart"
    figures = tag("div", *(tag("figure", chart) for chart in plot.charts), class_=style)
    numbers = tag("details", tag("summary", "Numbers"), *notes, table(plot.columns, plot.rows))
    parts = tag("h3", plot.title), tag("p", plot.takeaway, class_="takeaway"), figures, numbers
    return tag("section", *parts, class_="whole" if plot.wide else None)


def _conditions(result: SavedResult) -> Element:
    told: dict[str, object] = {
        "command": result.run.command,
        "date": result.run.date,
        "commit": result.run.commit,
        **result.run.versions,
        "target": result.target,
        "draft": result.draft,
        "type": result.dtype,
        "prompts": result.prompts,
        "seeds": "of each prompt's id, plus the round" if result.seed is None else result.seed,
        "temperature": result.temperature,
        "new tokens": result.max_tokens,
        "pace": result.pace,
        **result.machine,
    }
    shown = {name: value for name, value in told.items() if value not in (None, "")}
    words = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in shown.items()}
    entries: list[Child] = [
        tag("div", tag("dt", name.replace("_", " ")), tag("dd", value)) for name, value in words.items()
    ]
    return tag("section", tag("h2", "Conditions"), tag("dl", *entries))
