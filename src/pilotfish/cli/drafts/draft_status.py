from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pilotfish.cli.options import JsonOption
from pilotfish.cli.reading import ApiKeyEnvOption, UrlOption, from_file, read_statistics
from pilotfish.cli.show import FILE_WIDTH, print_json, print_line, print_table, table_of

if TYPE_CHECKING:
    from pilotfish.server.observe.fleet_metrics import KnownPool

ROUTE = "/v1/drafts"
#: Counts of normal events of drafts; all others break rules.
NORMAL = frozenset({"late_nodes", "repeated_nodes", "stale_frames", "unknown_messages", "pauses"})


def draft_status(
    url: UrlOption = None,
    source: Annotated[Path | None, from_file(ROUTE)] = None,
    api_key_env: ApiKeyEnvOption = "",
    json: JsonOption = False,
) -> None:
    """Show the draft pools that a server's targets know: what they can do, how far away, late, right and lawful they
    are (docs/draft-check.md)."""
    from msgspec import to_builtins

    from pilotfish.server.observe.fleet_metrics import DraftPools

    (pools,) = read_statistics(DraftPools, ROUTE, [url], [source], api_key_env)
    if json:
        print_json(to_builtins(pools))
    elif not pools.data:
        print_line("No target of this server knows a draft pool: it does not run with --mode async.")
    else:
        cells = [_cells(known) for known in pools.data]
        for title in cells[0]:
            names = [{"target": known.target, "pool": known.pool.name} for known in pools.data]
            rows = [{**name, **own[title]} for name, own in zip(names, cells, strict=True)]
            print_table(table_of(rows, left=rows[0], title=title, boxed=True), in_file=FILE_WIDTH)


def _cells(known: KnownPool) -> dict[str, dict[str, str]]:
    pool = known.pool
    broken = {reason: count for reason, count in pool.drops.items() if count and reason not in NORMAL}
    how = {
        "draft": f"{pool.model} {pool.revision}".strip() or "-",
        "state": known.state if pool.refusal is None else f"{known.state}: {pool.refusal}",
        "sessions": f"{pool.own_sessions} of {pool.sessions}",
        "free KV": f"{pool.free_slots} of {pool.slots}" if pool.slots else str(pool.free_slots),
        "one way, ms": "-" if pool.delay_ms is None else f"{pool.delay_ms:.2f}",
        "level, ms": f"{pool.step_ms:.2f}",
        "waits, ms": f"{pool.queue_ms:.2f}",
    }
    guesses = {
        "trees": str(pool.trees),
        "nodes": str(pool.nodes),
        "late": _percent(known.lateness),
        "verified": str(pool.verified),
        "accepted": _percent(known.acceptance),
        "rules broken": ", ".join(f"{reason} {count}" for reason, count in broken.items()) or "none",
    }
    able = {"capabilities": ", ".join(pool.capabilities) or "none"}
    return {"How they are": how, "What they guess": guesses, "What they can do": able}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
