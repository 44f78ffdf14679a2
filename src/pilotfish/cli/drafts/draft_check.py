"""`pilotfish draft-check`: targets played at a draft pool, and which rules of the protocol it breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pilotfish.cli.options import DEFAULT_PAIR, JsonOption
from pilotfish.cli.show import print_json
from pilotfish.errors import InputError, ParameterError

if TYPE_CHECKING:
    from pilotfish.core.drafting.messages import Hello
    from pilotfish.wire.conformance.kit import ConformanceReport
    from pilotfish.wire.conformance.player import PlayerChannel

#: Columns of a table in a file.
WIDTH = 140
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
    from pilotfish.wire.conformance.checks import CheckError, KitOptions
    from pilotfish.wire.conformance.kit import CHECKS, SENTENCES, examine

    if listing:
        _print_sentences(SENTENCES)
        return
    if pool is None:
        raise ParameterError("pool", None, "the address that the draft listens at")
    for name in only or ():
        if name not in SENTENCES:
            raise ParameterError("only", name, "one of the names that --list shows")
    hello = _hello(tokenizer, pair, tokenizer_digest, vocab_size)
    options = KitOptions(patience, context, sessions, garbage, seed)
    total = len([check for check in CHECKS if not only or check.name in only])
    with _progress(total) as done:
        try:
            report = examine(_dialling(pool, key, pool_key, insecure), hello, options, only or (), done)
        except CheckError as error:
            raise InputError(f"pool: {pool}: {error}") from error
    _show(report, json)
    raise typer.Exit(int(bool(report.failed)))


def _hello(tokenizer: Path | None, pair: str | None, digest: str, vocab_size: int) -> Hello:
    from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, Hello

    if sum((tokenizer is not None, pair is not None, bool(digest))) > 1:
        raise InputError("tokenizer: give one of --tokenizer, --pair and --tokenizer-digest")
    can = list(TARGET_CAPABILITIES)
    if digest:
        return Hello(PROTOCOL_VERSION, digest, vocab_size, "draft-check", capabilities=can)
    from pilotfish.core.drafting.vocabulary import added_tokens
    from pilotfish.core.drafting.vocabulary import tokenizer_digest as digest_of
    from pilotfish.engine import pairs
    from pilotfish.model.loading.metadata import load_tokenizer

    loaded = load_tokenizer(tokenizer or pairs.resolve_pair(pair or DEFAULT_PAIR).target)
    return Hello(
        PROTOCOL_VERSION, digest_of(loaded), len(loaded), "draft-check", added_tokens(loaded), capabilities=can
    )


def _dialling(pool: str, key: Path | None, pool_key: str, insecure: bool) -> Callable[[bytes], PlayerChannel]:
    from pilotfish.wire.curve_keys import load_target_keys
    from pilotfish.wire.endpoints import check_spelling
    from pilotfish.wire.sockets import DialingChannel

    check_spelling("pool", pool)
    keys = load_target_keys(key, [pool_key] if pool_key else [], 1)
    return lambda incarnation: DialingChannel([pool], incarnation, keys, insecure)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr."""
    from pilotfish.bench.report import ProgressBar

    with ProgressBar() as bar:
        bar.total = total
        yield bar


def _print_sentences(sentences: dict[str, str]) -> None:
    console = _console()
    for name, sentence in sentences.items():
        console.print(f"{name:26} {sentence}", markup=False)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def _show(report: ConformanceReport, as_json: bool) -> None:
    from msgspec import to_builtins

    if as_json:
        print_json(to_builtins(report))
        return
    console = _console()
    console.print(_findings(report))
    if report.figures:
        console.print(_figures(report))
    failed, passed = len(report.failed), sum(finding.status == "pass" for finding in report.findings)
    what = f"{report.trees} Trees with {report.nodes} nodes came. {passed} checks passed, {failed} failed."
    sys.stdout.write(f"{what}\n")


def _findings(report: ConformanceReport) -> Table:
    from pilotfish.printable import printable

    able = ", ".join(report.capabilities) or "none"
    title = f"{report.model} {report.revision}".strip() + f"; capabilities: {able}"
    table = Table(title=printable(title), title_justify="left")
    for column in ("", "check", "result", "what was seen"):
        table.add_column(column, overflow="fold")
    for finding in report.findings:
        result = f"[{STYLES[finding.status]}]{finding.status}[/]"
        table.add_row(finding.group, finding.name, result, _escaped(finding.evidence))
    return table


def _figures(report: ConformanceReport) -> Table:
    table = Table(title="Measured, and not judged", title_justify="left")
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right")
    for figure in report.figures:
        table.add_row(figure.name, f"{figure.value:.2f} {figure.unit}")
    return table


def _escaped(text: str) -> str:
    from rich.markup import escape

    from pilotfish.printable import printable

    return escape(printable(text))
