"""What a bench and an engine in another process say to each other: a line of JSON each. Quick to import."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import IO

import msgspec
from msgspec import Struct

from pilotfish.engine.processes.process import die_with_parent

PLAIN, DRAFT, LOOKUP = "plain", "draft", "prompt lookup"


class PeerSetup(Struct, frozen=True, kw_only=True):
    """How a peer is to run. `target` and `draft` are in its own format; without a draft it runs those ways that need
    none."""

    target: str
    draft: str | None
    threads: int
    dtype: str  # "float32" or "bfloat16"
    context: int = 0  # the most tokens of a prompt and its output; 0: the model's
    guesses: tuple[int, ...] = ()  # tokens that a draft guesses at a time, beside what the library chooses
    quantization: str = "none"

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()


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


Way = Callable[[Question], Generated]


class PeerReady(Struct, frozen=True, kw_only=True):
    """A peer's first line: what it can do."""

    ways: list[str]
    precision: str
    sampling: list[str]  # those ways that can do more than take the likeliest token
    left_out: dict[str, str]  # reasons by way


@dataclass(frozen=True)
class LoadedPeer:
    """Ways of generating by name, the plain one first; in which precision; which can sample; and why others are left
    out."""

    ways: Mapping[str, Way]
    precision: str
    sampling: Collection[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> PeerReady:
        return PeerReady(
            ways=list(self.ways),
            precision=self.precision,
            sampling=list(self.sampling),
            left_out=dict(self.left_out),
        )


def serve(load: Callable[[str], LoadedPeer]) -> None:
    """Be a peer: load what the command line's argument says, tell it, answer until stdin ends. Whatever libraries print
    goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    die_with_parent()
    answer_all(load(sys.argv[1]), sys.stdin.buffer, answers)


def answer_all(peer: LoadedPeer, questions: IO[bytes], answers: IO[bytes]) -> None:
    _say(peer.ready, answers)
    for line in questions:
        question = msgspec.json.decode(line, type=Question)
        _say(peer.ways[question.way](question), answers)


def _say(said: Struct, answers: IO[bytes]) -> None:
    answers.write(msgspec.json.encode(said) + b"\n")
    answers.flush()


def setup_of(text: str) -> PeerSetup:
    return msgspec.json.decode(text, type=PeerSetup)
