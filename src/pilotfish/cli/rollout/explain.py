import sys
from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from pilotfish.cli.options import JsonOption
from pilotfish.cli.pages.document import write_file
from pilotfish.cli.pages.explanation import explanation_page
from pilotfish.cli.reading import ApiKeyEnvOption, UrlOption, from_file, moment_of, read_statistics
from pilotfish.cli.show import FILE_WIDTH, print_json, table_of
from pilotfish.errors import ParameterError
from pilotfish.operate.explaining import explain as explaining
from pilotfish.operate.explaining.cohorts import CohortStatistics
from pilotfish.operate.explaining.explain_wording import headline
from pilotfish.operate.explaining.explanation import Explanation

ROUTE = "/v1/rollout/statistics"
INTERVAL = "BEGIN..END, each now, an age as in 90m, 2h or 1d, or an ISO time, that begins before it ends"
#: Rows of the table of figures.
ROWS = {
    "requests": "requests",
    "cut": "others, whose variant was cut",
    "accepted_per_step": "accepted tokens a step",
    "wanted": "steps that wanted a tree",
    "late": "of them, without one in time",
    "accepted_per_tree": "accepted tokens a tree",
    "nodes_per_tree": "nodes a tree",
    "tokens_per_step": "tokens a step",
}
SHARES = ("wanted", "late")
PARTS = ("mix", "within", "interaction")


def explain(
    before: Annotated[str, typer.Option(metavar="INTERVAL", help="As 2h..1h: ages, now, or ISO times.")],
    after: Annotated[str, typer.Option(metavar="INTERVAL", help="As 1h..now.")],
    url: UrlOption = None,
    source: Annotated[Path | None, from_file(ROUTE)] = None,
    api_key_env: ApiKeyEnvOption = "",
    html: Annotated[Path | None, typer.Option(help="Write the explanation as a page to this file, too.")] = None,
    json: JsonOption = False,
) -> None:
    """Say why acceptance changed between two intervals, and what to do (docs/explaining.md)."""
    (statistics,) = read_statistics(CohortStatistics, ROUTE, [url], [source], api_key_env)
    spans = [span_of(*given, statistics.now) for given in (("before", before), ("after", after))]
    found = explaining.explain(*(statistics.between(*span) for span in spans))
    print_json(to_builtins(found)) if json else _print(found)
    if html is not None:
        write_file(explanation_page(found), html)


def span_of(field: str, text: str, now: float) -> tuple[float, float]:
    """Seconds since the epoch; ParameterError, naming `field`, for another text."""
    begin, _, end = text.partition("..")
    try:
        span = moment_of(begin, now), moment_of(end, now)
    except ValueError:
        span = now, now
    if span[0] >= span[1]:
        raise ParameterError(field, text, INTERVAL)
    return span


def _print(found: Explanation) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(Text(found.sentence, style="bold"))
    if found.before is None or found.after is None:
        return
    sides = {"before": found.before, "after": found.after}
    figures = [
        {"": words, **{side: _figure(name, getattr(of, name)) for side, of in sides.items()}}
        for name, words in ROWS.items()
    ]
    console.print()
    console.print(table_of(figures))
    console.print()
    for number, cause in enumerate(found.causes, start=1):
        console.print(Text(f"{number}. {headline(cause)}", style="bold"))
        for line in (Text(cause.sentence), Text.assemble(("What to do: ", "dim"), cause.advice)):
            console.print(Padding(line, (0, 0, 0, 3), expand=False))
        console.print()
    if found.causes:
        console.print(Text(f"Of the change, {found.rest / found.change:.0%} is noise, or what no cause stands for."))
    console.print()
    parts = [
        {"accepted tokens a step, by": one.dimension, **{name: f"{getattr(one, name):+.3f}" for name in PARTS}}
        for one in found.parts
    ]
    console.print(table_of(parts))


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if name in SHARES else f"{value:.2f}" if isinstance(value, float) else str(value)
