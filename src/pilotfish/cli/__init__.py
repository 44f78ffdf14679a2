"""The command line: options come in, a command calls one function of a room below, text or JSON goes out. Exit codes:
0 done, 2 bad usage or input, 1 failure. `generate.py` first."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import typer
from typer.exceptions import TyperException

from pilotfish.cli import chat, cluster, generate, keys, kv, models, serve, train, workers
from pilotfish.cli.bench.commands import app as bench_app
from pilotfish.cli.demo import command as demo
from pilotfish.cli.drafts import draft_check, draft_status
from pilotfish.cli.plan import command as plan
from pilotfish.cli.rollout import capture, explain
from pilotfish.cli.rollout import command as rollout
from pilotfish.cli.vllm_arguments import ServeCommand
from pilotfish.errors import InputError
from pilotfish.printable import OneLineFormatter, one_line

INTERRUPTED = 130  # what Typer makes of Ctrl-C

app = typer.Typer(
    name="pilotfish",
    help="LLM inference with lossless speculative decoding.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("serve", cls=ServeCommand)(serve.serve)
app.command("explain")(explain.explain)
app.command("draft")(workers.draft)
app.command("draft-check")(draft_check.draft_check)
app.command("draft-status")(draft_status.draft_status)
app.command("prefill")(workers.prefill)
app.command("target")(workers.target)
app.command("rank", hidden=True)(workers.rank)
app.add_typer(bench_app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(keys.app, name="keys")
app.add_typer(kv.app, name="kv")
app.add_typer(models.app, name="models")
app.add_typer(plan.app, name="plan")
rollout.app.add_typer(capture.app, name="capture")
app.add_typer(rollout.app, name="rollout")
app.add_typer(train.app, name="train")


@cache
def commands() -> Callable[..., Any]:
    """All of them, which take a moment to be read from their signatures."""
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are one line on stderr."""
    if logging.lastResort is not None:  # prints the log of commands that configure none
        logging.lastResort.setFormatter(OneLineFormatter())
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code: int = commands()(arguments, prog_name="pilotfish", standalone_mode=False) or 0
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
