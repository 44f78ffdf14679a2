"""The command line: options come in, a command calls one function of a room below, text or JSON goes out. Exit codes:
0 done, 2 bad usage or input, 1 failure. `generate.py` first."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.exceptions import TyperException

from pilotfish.errors import InputError
from pilotfish.printable import OneLineFormatter, one_line

INTERRUPTED = 130  # what Typer makes of Ctrl-C
#: Modules by command: each has a function of the command's name, or an `app`, which is a group of them.
MODULES = {
    "generate": "generate",
    "chat": "chat",
    "demo": "demo.command",
    "serve": "serve",
    "explain": "rollout.explain",
    "draft": "workers",
    "draft-check": "drafts",
    "draft-status": "drafts",
    "prefill": "workers",
    "target": "workers",
    "rank": "workers",
    "bench": "bench.commands",
    "cluster": "cluster",
    "keys": "keys",
    "kv": "kv",
    "models": "models",
    "plan": "plan.command",
    "rollout": "rollout.command",
    "train": "train",
}


@cache
def commands(*names: str) -> Callable[..., Any]:
    """These, whose modules are imported and read for their options, which takes a moment each."""
    help, group = "LLM inference with lossless speculative decoding.", lambda: None
    app = typer.Typer(help=help, callback=group, add_completion=False, pretty_exceptions_enable=False)
    for name in names:
        module = import_module(f"{__name__}.{MODULES[name]}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            own = getattr(module, name.replace("-", "_"))
            app.command(name, cls=getattr(module, "COMMAND", None), hidden=name == "rank")(own)
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are one line on stderr."""
    if logging.lastResort is not None:  # prints the log of commands that configure none
        logging.lastResort.setFormatter(OneLineFormatter())
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        named = arguments[:1] if arguments[0] in MODULES else MODULES
        code: int = commands(*named)(arguments, prog_name="pilotfish", standalone_mode=False) or 0
        return _fail("interrupted", 1) if code == INTERRUPTED else code
    except TyperException as error:
        return _fail(error.format_message() or "Missing command.", 2)  # a group without one has shown its help
    except InputError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that flushing at exit does not fail again
        return 1
    except Exception as error:
        if os.environ.get("PILOTFISH_DEBUG"):
            raise
        return _fail(f"{type(error).__name__}: {error}", 1)


def _fail(message: str, code: int) -> int:
    print(f"pilotfish: {one_line(message)}", file=sys.stderr)  # noqa: T201
    return code
