"""A result as one HTML file: no other file, no network, no script."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element

from pilotfish.bench.acceptance_plots import acceptance_by_category, acceptance_by_depth, acceptance_by_position
from pilotfish.bench.markup import Child, document, tag
from pilotfish.bench.plots import Drawn, Plot, latencies, speedups
from pilotfish.bench.saved import OFF, SavedResult
from pilotfish.bench.timeline import timeline
from pilotfish.errors import ParameterError

STYLE = Path(__file__).with_name("page.css")


def write_page(result: SavedResult, path: Path) -> None:
    """ParameterError where the file cannot be written."""
    try:
        path.write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ParameterError("html", str(path), f"a file that can be written ({error.strerror})") from error


def page(result: SavedResult) -> str:
    drawn = Drawn.of(result)
    title = f"Speculation, measured: {_models(result)}" if result.target else f"Served: {result.model or 'a model'}"
    body = tag("main", *_heading(drawn, title), _legend(drawn), *_sections(drawn), _conditions(result))
    return whole_page(title, body)


def whole_page(title: str, body: Element) -> str:
    """A document that needs no other file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"Pilotfish: {title}"),
        tag("style", STYLE.read_text("utf-8")),
    )
    return document(tag("html", head, tag("body", body), lang="en"))


def _models(result: SavedResult) -> str:
    names = [
        "/".join(Path(model).parts[-2:]) for model in (result.target, result.draft) if model not in (None, "", "None")
    ]
    return " with ".join(names)


def _heading(drawn: Drawn, title: str) -> list[Element]:
    """Title, warnings, and the first lines of what was found."""
    result, parts = drawn.result, [tag("h1", title)]
    if result.pace:
        words = f"{result.pace}. Times are those of emulated devices; tokens and acceptance are real."
        parts.append(tag("p", tag("b", "Paced: "), words, class_="notice"))
    if result.invalid:
        parts.append(
            tag(
                "p",
                tag("b", "Invalid: "),
                f"{result.invalid}. No speed on this page is that of the devices.",
                class_="alarm",
            )
        )
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
        parts = [_section(plot) for plot in _plots_at(drawn, load) if plot is not None]
        words = drawn.at(load)
        if parts and len(loads) > 1:
            summary = tag("summary", tag("h2", words[0].upper() + words[1:]))
            opened = "" if load == loads[0] else None
            sections.append(tag("details", summary, tag("div", *parts, class_="plots"), class_="load", open=opened))
        else:
            sections.append(tag("div", *parts, class_="plots"))
    return sections


def _plots_at(drawn: Drawn, load: float) -> list[Plot | None]:
    acceptance = (acceptance_by_depth, acceptance_by_position, acceptance_by_category)
    return [latencies(drawn, load), *(draw(drawn, load) for draw in acceptance), timeline(drawn, load)]


def _section(plot: Plot) -> Element:
    notes = [tag("p", plot.note)] if plot.note else []
    keys = [tag("span", tag("i", class_=f"swatch {style}"), words) for style, words in plot.keys]
    return tag(
        "section",
        tag("h3", plot.title),
        tag("p", plot.takeaway, class_="takeaway"),
        tag(
            "div",
            *(tag("figure", chart) for chart in plot.charts),
            class_="charts" if len(plot.charts) > 1 else "chart",
        ),
        tag("p", *keys, class_="legend") if keys else None,
        tag("details", tag("summary", "Numbers"), *notes, table(plot.columns, plot.rows)),
        class_="whole" if plot.wide else None,
    )


def table(columns: list[str], rows: list[list[str]]) -> Element:
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def _conditions(result: SavedResult) -> Element:
    """What to know to measure it again."""
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
    rows = [(name.replace("_", " "), _worded(value)) for name, value in told.items() if value not in (None, "")]
    entries: list[Child] = [tag("div", tag("dt", name), tag("dd", value)) for name, value in rows]
    return tag("section", tag("h2", "Conditions"), tag("dl", *entries))


def _worded(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
