from __future__ import annotations

import json as jsons
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.errors import InputError, ParameterError

if TYPE_CHECKING:
    from pilotfish.wire.conformance.dump import TappedFrame

#: Fields that begin a line.
HEAD = ("at", "from", "target", "bytes", "type")
PERIOD = 0.2


def draft_dump(
    file: Annotated[Path | None, typer.Option(help="A recording to show.")] = None,
    listen: Annotated[str | None, typer.Option(help="Where targets are to dial instead of the pool.")] = None,
    pool: Annotated[str | None, typer.Option(help="The pool to pass frames on to.")] = None,
    record: Annotated[Path | None, typer.Option(help="Keep the frames in this file, too.")] = None,
    kind: Annotated[list[str] | None, typer.Option("--type", metavar="TYPE", help="Show these alone.")] = None,
    json: JsonOption = False,
) -> None:
    """Show the frames between targets and a draft pool, a line each (docs/draft-check.md): of a recording, or live,
    with the command between the two until Ctrl-C. Connections with keys cannot be looked into."""
    from pilotfish.wire.conformance.dump import described, recorded

    def show(tapped: TappedFrame) -> None:
        told = described(tapped)
        if not kind or told.get("type") in kind:
            sys.stdout.write((jsons.dumps(told, ensure_ascii=False) if json else line_of(told)) + "\n")

    if file is not None:
        if listen or pool or record:
            raise InputError("file: it cannot be combined with --listen, --pool and --record")
        for tapped in recorded(file):
            show(tapped)
    else:
        _tap(listen, pool, record, show)


def _tap(listen: str | None, pool: str | None, record: Path | None, show: Callable[[TappedFrame], None]) -> None:
    import msgspec

    from pilotfish.wire.conformance.dump import Tap
    from pilotfish.wire.endpoints import dialled_endpoint, listening_endpoint

    if listen is None or pool is None:
        missing = "listen" if listen is None else "pool"
        raise ParameterError(missing, None, "an address, with --listen and --pool, or a recording (--file)")
    here, there = listening_endpoint("listen", listen), dialled_endpoint("pool", pool)
    for field, text, where in (("listen", listen, here), ("pool", pool, there)):
        if not where.private:
            allowed = "an address of this host alone: between hosts there are keys, and what they hide cannot be shown"
            raise ParameterError(field, text, allowed)
    try:
        kept = None if record is None else record.open("xb")
    except OSError as error:
        raise InputError(f"record: {record} cannot be written: {error.strerror}") from error
    stopped = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with kept or nullcontext(), Tap(here, there) as tap:
        sys.stderr.write(f"pilotfish: passes frames from {tap.endpoint} on to {pool}; Ctrl-C ends\n")

        def seen(tapped: TappedFrame) -> None:
            show(tapped)
            if kept is not None:
                kept.write(msgspec.json.encode(tapped) + b"\n")

        while not stopped.is_set():
            tap.turn(PERIOD, seen)
            sys.stdout.flush()


def line_of(told: dict[str, Any]) -> str:
    way = "→" if told["from"] == "target" else "←"
    rest = [f"{name} {jsons.dumps(value, ensure_ascii=False)}" for name, value in told.items() if name not in HEAD]
    kind = told.get("type", "?")
    return f"{told['at']:11.6f} {told['target']:16} {way} {kind!s:9} {told['bytes']:6} B  {', '.join(rest)}"
