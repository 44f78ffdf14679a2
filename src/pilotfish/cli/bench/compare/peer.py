"""An engine in a process of its own, and its bench: what they say to each other, a line of JSON each. Run as
`python -m pilotfish.cli.bench.compare.peer MODULE SETUP`; quick to import."""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TypeVar

import msgspec
from msgspec import Struct

from pilotfish.engine.processes.process import WorkerSpec, die_with_parent, on_cores, worker_environment
from pilotfish.errors import EngineError

PLAIN, DRAFT, LOOKUP = "plain", "draft", "prompt lookup"
#: Ways in which a draft guesses so many tokens at a time, beside the number that the library chooses.
GUESSES = {f"{DRAFT} of {tokens}": tokens for tokens in (3, 8)}
#: OpenMP's threads of other engines wait as their users have them, awake for some milliseconds. Ours sleep, and
#: importing anything of ours has said so; this says otherwise to GNU's, whose default it is.
AWAKE = {"GOMP_SPINCOUNT": "300000"}
OURS = "pilotfish_peer"

Said = TypeVar("Said", bound=Struct)


class PeerSetup(Struct, frozen=True, kw_only=True):
    """`target` and `draft` are in the engine's own format; without a draft it runs the ways that need none."""

    target: str
    draft: str | None
    threads: int
    dtype: str  # "float32" or "bfloat16"
    context: int = 0  # the most tokens of a prompt and its output; 0: the model's


class Question(Struct, frozen=True, kw_only=True):
    """A prompt's tokens to go on with, for `max_tokens` tokens: the end of sequence is a token like others."""

    prompt: list[int]
    max_tokens: int
    way: str = ""
    temperature: float = 0.0
    seed: int = 0


class Generated(Struct, frozen=True, kw_only=True):
    """Seconds from the prompt's tokens to the output's last one."""

    seconds: float
    tokens: list[int]
    verify_steps: int = 0  # 0: not told

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


class PeerReady(Struct, frozen=True, kw_only=True):
    """A peer's first line: what it can do."""

    ways: list[str]
    precision: str
    sampling: list[str]  # those ways that can do more than take the likeliest token


Way = Callable[[Question], Generated]


@dataclass(frozen=True)
class LoadedPeer:
    """Ways of generating by name, the plain one first; in which precision; which of them can sample."""

    ways: Mapping[str, Way]
    precision: str
    sampling: Collection[str] = ()

    @property
    def ready(self) -> PeerReady:
        return PeerReady(ways=list(self.ways), precision=self.precision, sampling=list(self.sampling))


# -- the bench's side


class Peer(subprocess.Popen[bytes]):
    """The peer of a module of this package, loading, on some cores. It ends with the `with`; its stderr is a file."""

    def __init__(self, engine: str, module: str, setup: str, cores: frozenset[int]) -> None:
        command = [sys.executable, "-m", __name__, module, setup]
        environment = worker_environment(WorkerSpec(engine, command, cores, {} if module == OURS else AWAKE))
        self._engine, self._log = engine, tempfile.TemporaryFile()  # noqa: SIM115  # open as long as it runs
        pipe = subprocess.PIPE
        with on_cores(cores):  # a group, not a session: Linux shares cores between sessions first, then threads
            super().__init__(command, env=environment, stdin=pipe, stdout=pipe, stderr=self._log, process_group=0)

    @cached_property
    def ready(self) -> PeerReady:
        """Waits until it is loaded; EngineError, with the last line that it wrote, where it ends instead."""
        return self._heard(PeerReady)

    def ask(self, way: str, question: Question) -> Generated:
        assert self.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and what it wrote last says why
            _say(msgspec.structs.replace(question, way=way), self.stdin)
        return self._heard(Generated)

    def _heard(self, kind: type[Said]) -> Said:
        assert self.stdout is not None
        if line := self.stdout.readline():
            return msgspec.json.decode(line, type=kind)
        code = self.wait()
        lines = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()
        raise EngineError(f"{self._engine}: exited with code {code}: {lines[-1] if lines else ''}")

    def __exit__(self, *_: object) -> None:
        self.kill()
        super().__exit__(None, None, None)
        self._log.close()


# -- the engine's side


def serve(module: str, setup: str) -> None:
    """Load what the setup says, tell it, answer until stdin ends. Whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    die_with_parent()
    answer_all(importlib.import_module(f"pilotfish.cli.bench.compare.{module}").load(setup), sys.stdin.buffer, answers)


def answer_all(peer: LoadedPeer, questions: IO[bytes], answers: IO[bytes]) -> None:
    _say(peer.ready, answers)
    for line in questions:
        question = msgspec.json.decode(line, type=Question)
        _say(peer.ways[question.way](question), answers)


def _say(said: Struct, to: IO[bytes]) -> None:
    to.write(msgspec.json.encode(said) + b"\n")
    to.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
