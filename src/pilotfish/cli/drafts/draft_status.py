"""`pilotfish draft-status`: the draft pools of a server's targets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.errors import InputError

if TYPE_CHECKING:
    from pilotfish.server.observe.draft_pools import DraftPools, KnownPool

ROUTE = "/v1/drafts"
#: Columns of a table in a file.
WIDTH = 140
#: Counts of what healthy drafts do, which are no broken rules.
NORMAL = frozenset({"late_nodes", "repeated_nodes", "stale_frames", "unknown_messages", "pauses"})


def draft_status(
    url: Annotated[str | None, typer.Option(help="Of the server.  [default: http://127.0.0.1:8000]")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help=f"A file that holds the answer to GET {ROUTE} instead.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the server's API key.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Show the draft pools that a server's targets know: what they can do, how far away, late, right and lawful they
    are (docs/draft-check.md)."""
    from msgspec import to_builtins

    pools = _pools(url, source, api_key_env)
    print_json(to_builtins(pools)) if json else _print(pools)


def _pools(url: str | None, source: Path | None, api_key_env: str) -> DraftPools:
    from pilotfish.cli.statistics_source import LOCAL, statistics_from_file, statistics_from_server
    from pilotfish.server.observe.draft_pools import DraftPools

    if source is None:
        return statistics_from_server(DraftPools, url or LOCAL, ROUTE, api_key_env)
    if url is not None:
        raise InputError("from: it cannot be combined with --url; give one of them")
    return statistics_from_file(DraftPools, source)


def _print(pools: DraftPools) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    if not pools.data:
        console.print("No target of this server knows a draft pool: it does not run with --mode async.", markup=False)
        return
    for title, row in (("How they are", _being), ("What they guess", _guessing), ("What they can do", _able)):
        console.print(_table(title, [row(known) for known in pools.data]))


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def _named(known: KnownPool) -> dict[str, str]:
    return {"target": known.target, "pool": known.pool.name}


def _being(known: KnownPool) -> dict[str, str]:
    pool = known.pool
    return {
        **_named(known),
        "draft": f"{pool.model} {pool.revision}".strip() or "-",
        "state": known.state if pool.refusal is None else f"{known.state}: {pool.refusal}",
        "sessions": f"{pool.own_sessions} of {pool.sessions}",
        "free KV": f"{pool.free_slots} of {pool.slots}" if pool.slots else str(pool.free_slots),
        "one way, ms": "-" if pool.delay_ms is None else f"{pool.delay_ms:.2f}",
        "level, ms": f"{pool.step_ms:.2f}",
        "waits, ms": f"{pool.queue_ms:.2f}",
    }


def _guessing(known: KnownPool) -> dict[str, str]:
    pool = known.pool
    broken = {reason: count for reason, count in pool.drops.items() if count and reason not in NORMAL}
    return {
        **_named(known),
        "trees": str(pool.trees),
        "nodes": str(pool.nodes),
        "late": _percent(known.lateness),
        "verified": str(pool.verified),
        "accepted": _percent(known.acceptance),
        "rules broken": ", ".join(f"{reason} {count}" for reason, count in broken.items()) or "none",
    }


def _able(known: KnownPool) -> dict[str, str]:
    return {**_named(known), "capabilities": ", ".join(known.pool.capabilities) or "none"}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
