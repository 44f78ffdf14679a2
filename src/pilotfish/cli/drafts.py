from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins
from msgspec.structs import replace
from rich.text import Text

from pilotfish.cli.options import JsonOption, model_directories
from pilotfish.cli.reading import ApiKeyEnvOption, UrlOption, from_file, read_statistics
from pilotfish.cli.show import FILE_WIDTH, print_json, print_line, print_table, table_of
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, Hello
from pilotfish.core.drafting.vocabulary import added_tokens, tokenizer_digest
from pilotfish.errors import InputError, ParameterError
from pilotfish.printable import printable
from pilotfish.progress import PhaseProgress
from pilotfish.server.observe.fleet_metrics import DraftPools, KnownPool
from pilotfish.wire.conformance.checks import CheckError, KitOptions
from pilotfish.wire.conformance.kit import CHECKS, SENTENCES, ConformanceReport, examine
from pilotfish.wire.curve_keys import load_target_keys
from pilotfish.wire.endpoints import check_spelling
from pilotfish.wire.sockets import DialingChannel

STYLES = {"pass": "green", "fail": "bold red", "skipped": "dim"}


def draft_check(
    pool: Annotated[str | None, typer.Option(help="Where the draft listens: ipc://… or tcp://…")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A model directory whose tokenizer the draft has.")] = None,
    pair: Annotated[str | None, typer.Option(help="Instead: the bundled pair.  [default: pycode]")] = None,
    tokenizer_digest: Annotated[str, typer.Option(help="Instead: the digest that Hello has.")] = "",
    vocab_size: Annotated[int, typer.Option(help="With it: token ids are below.", min=64, max=1 << 31)] = 4096,
    key: Annotated[Path | None, typer.Option(help="The kit's key file, for a pool with keys.")] = None,
    pool_key: Annotated[str, typer.Option(help="The pool's public key.")] = "",
    insecure: Annotated[bool, typer.Option(help="Do without keys beyond this host.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A check, or rule; several times.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds that the draft may take.", min=0.5, max=600)] = 5.0,
    context: Annotated[int, typer.Option(help="Tokens of the longest prompt.", min=16, max=1 << 20)] = 1024,
    sessions: Annotated[int, typer.Option(help="At once, at most.", min=1, max=4096)] = 256,
    garbage: Annotated[int, typer.Option(help="Mutated frames.", min=0, max=10**8)] = 20_000,
    seed: Annotated[int, typer.Option(help="Of what is random.", min=0, max=(1 << 32) - 1)] = 0,
    listing: Annotated[bool, typer.Option("--list", help="Show all checks and rules, and what each is about.")] = False,
    json: JsonOption = False,
) -> None:
    """Play targets at a draft of any make, and report which rules of the draft protocol it keeps
    (docs/draft-check.md). Exits with 1 if it breaks one."""
    if listing:
        print_line(*(f"{name:26} {sentence}" for name, sentence in SENTENCES.items()))
        return
    if pool is None:
        raise ParameterError("pool", None, "the address that the draft listens at")
    for name in only or ():
        if name not in SENTENCES:
            raise ParameterError("only", name, "one of the names that --list shows")
    hello = _hello(tokenizer, pair, tokenizer_digest, vocab_size)
    check_spelling("pool", pool)
    keys = load_target_keys(key, [pool_key] if pool_key else [], 1)
    options = KitOptions(patience, context, sessions, garbage, seed)
    total = sum(not only or check.name in only for check in CHECKS)
    with PhaseProgress() as progress:
        bar = progress.begin("checks", total).id  # is never ended, so that its last line is shown
        try:
            report = examine(
                lambda incarnation: DialingChannel([pool], incarnation, keys, insecure),
                hello,
                options,
                only or (),
                lambda name: progress.update(bar, advance=1, description=name),
            )
        except CheckError as error:
            raise InputError(f"pool: {pool}: {error}") from error
    print_json(to_builtins(report)) if json else _print(report)
    raise typer.Exit(int(bool(report.failed)))


def _hello(tokenizer: Path | None, pair: str | None, digest: str, vocab_size: int) -> Hello:
    if sum((tokenizer is not None, pair is not None, bool(digest))) > 1:
        raise InputError("tokenizer: give one of --tokenizer, --pair and --tokenizer-digest")
    hello = Hello(PROTOCOL_VERSION, digest, vocab_size, "draft-check", capabilities=list(TARGET_CAPABILITIES))
    if digest:
        return hello
    from pilotfish.model.loading.metadata import load_tokenizer

    loaded = load_tokenizer(tokenizer or model_directories(pair, None, None)["target"])
    known = {"tokenizer": tokenizer_digest(loaded), "vocab_size": len(loaded), "added_tokens": added_tokens(loaded)}
    return replace(hello, **known)


def _print(report: ConformanceReport) -> None:
    able = ", ".join(report.capabilities) or "none"
    title = f"{report.model} {report.revision}".strip() + f"; capabilities: {able}"
    rows = [
        {
            "": one.group,
            "check": one.name,
            "result": Text(one.status, style=STYLES[one.status]),
            "what was seen": printable(one.evidence),
        }
        for one in report.findings
    ]
    print_table(table_of(rows, left=("check", "result", "what was seen"), title=title, boxed=True), in_file=FILE_WIDTH)
    if report.figures:
        figures = [{"figure": one.name, "value": f"{one.value:.2f} {one.unit}"} for one in report.figures]
        print_table(table_of(figures, title="Measured, and not judged", boxed=True), in_file=FILE_WIDTH)
    passed, failed = sum(finding.status == "pass" for finding in report.findings), len(report.failed)
    print_line(f"{report.trees} Trees with {report.nodes} nodes came. {passed} checks passed, {failed} failed.")


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
