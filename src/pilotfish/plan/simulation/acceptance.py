"""An acceptance trace has a target's tokens and a draft's guesses for each. Simulations replay it, so that trees are
accepted as a real pair's are; traces can also be drawn at random.

A file has one JSON object a line: the pair first, then each sequence. A name that ends with .gz is compressed."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from pilotfish.core.trees.tree import Floats, Ints
from pilotfish.errors import ParameterError

TracedLine = TypeVar("TracedLine")
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
LogChance = Annotated[float, Meta(le=0)]
#: How alike drawn chances of first guesses are over positions. Those of real drafts are near 0 or 1 mostly.
CONCENTRATION = 0.8
#: Traces in this package, by name.
BUNDLED = {"pycode": Path(__file__).with_name("pycode.jsonl.gz")}


class TracedPair(Struct, frozen=True, forbid_unknown_fields=True):
    target: str
    draft: str
    temperature: Annotated[float, Meta(ge=0)]
    vocab_size: Annotated[int, Meta(ge=1)]


class TracedSequence(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    prompt: Annotated[list[Token], Meta(min_length=1)]
    tokens: Annotated[list[Token], Meta(min_length=1)]  # [n], of the output
    guesses: list[list[Token]]  # [n, k], the draft's likeliest in each one's place
    log_chances: list[list[LogChance]]  # [n, k], falling


class AcceptanceTrace(Struct, frozen=True):
    pair: TracedPair
    prompts: Sequence[Sequence[int]]  # of each sequence
    first: Ints  # [sequences], where its output begins
    tokens: Ints  # [n]
    guesses: Ints  # [n, k]
    log_chances: Floats  # [n, k]

    @classmethod
    def of(cls, pair: TracedPair, sequences: Sequence[TracedSequence]) -> "AcceptanceTrace":
        """At least one sequence; ParameterError unless all tokens have equally many guesses."""
        for sequence in sequences:
            _check(sequence, width=len(sequences[0].guesses[0]) if sequences[0].guesses else 0)
        lengths = np.array([len(sequence.tokens) for sequence in sequences])
        return cls(
            pair,
            [sequence.prompt for sequence in sequences],
            np.cumsum(lengths) - lengths,
            np.concatenate([np.array(sequence.tokens, np.int64) for sequence in sequences]),
            np.concatenate([np.array(sequence.guesses, np.int64) for sequence in sequences]),
            np.concatenate([np.array(sequence.log_chances, np.float64) for sequence in sequences]),
        )

    @property
    def width(self) -> int:
        return int(self.guesses.shape[1])

    @property
    def acceptance(self) -> float:
        """The share of tokens that the first guess meets."""
        return float(np.mean(self.guesses[:, 0] == self.tokens))

    @property
    def ranks(self) -> Ints:
        """[n] of each token among its guesses, from 0; `width`: not among them."""
        found = self.guesses == self.tokens[:, None]
        return np.where(found.any(axis=1), found.argmax(axis=1), self.width)


def _check(sequence: TracedSequence, width: int) -> None:
    rows = {*map(len, sequence.guesses), *map(len, sequence.log_chances)}
    counts = {len(sequence.guesses), len(sequence.log_chances), len(sequence.tokens)}
    if rows != {width} or not width or len(counts) > 1:
        expected = "as many guesses and log_chances for each token, and as many of each in the whole trace"
        raise ParameterError("trace", sequence.id, expected)


def trace_of(trace: str, acceptance: float | None) -> AcceptanceTrace:
    """A bundled trace by name, or a file's; with `acceptance`, a drawn one."""
    if acceptance is None:
        return read_acceptance(BUNDLED.get(trace, Path(trace)))
    if not 0 < acceptance < 1:
        raise ParameterError("acceptance", acceptance, "a number between 0 and 1")
    return drawn_acceptance(acceptance)


def read_acceptance(path: Path) -> AcceptanceTrace:
    """ParameterError names the first bad line."""
    try:
        with (gzip.open if path.suffix == ".gz" else Path.open)(path, "rb") as file:
            lines = list(file)
    except (OSError, EOFError, zlib.error) as error:
        raise ParameterError("trace", str(path), f"a readable file: {error}") from None
    if len(lines) < 2:
        raise ParameterError("trace", str(path), "a line of the pair and one for each sequence")
    pair = _decoded(path, 1, lines[0], TracedPair)
    sequences = [_decoded(path, number, line, TracedSequence) for number, line in enumerate(lines[1:], 2)]
    return AcceptanceTrace.of(pair, sequences)


def _decoded(path: Path, number: int, line: bytes, kind: type[TracedLine]) -> TracedLine:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParameterError("trace", f"{path}:{number}", f"a {kind.__name__}: {error}") from None


def write_acceptance(path: Path, pair: TracedPair, sequences: Sequence[TracedSequence]) -> None:
    lines = [msgspec.json.encode(pair)]
    for sequence in sequences:
        rounded = [[round(chance, 3) for chance in row] for row in sequence.log_chances]
        lines.append(msgspec.json.encode(msgspec.structs.replace(sequence, log_chances=rounded)))
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def drawn_acceptance(
    acceptance: float, *, sequences: int = 32, prompt: int = 128, output: int = 256, width: int = 12, seed: int = 0
) -> AcceptanceTrace:
    """One guess of each token, mostly the likeliest, is right with this mean chance, 0 to 1; the likeliest a bit more
    often. Chances are Beta-distributed and calibrated; what is left of each falls to the other guesses in halves."""
    random, count, vocab = np.random.default_rng(seed), sequences * output, 1 << 15
    first = random.beta(CONCENTRATION * acceptance, CONCENTRATION * (1 - acceptance), count)
    chances = np.column_stack((first, (1 - first)[:, None] * 0.5 ** np.arange(1, width)))
    guesses = (random.integers(vocab, size=(count, 1)) + np.arange(width)) % vocab
    right = (random.random(count)[:, None] > np.cumsum(chances, axis=1)).sum(axis=1)  # `width`: none of the guesses
    tokens = (guesses[:, 0] + right) % vocab
    prompts = random.integers(vocab, size=(sequences, prompt)).tolist()
    pair = TracedPair("drawn", f"{acceptance:g}", 0.0, vocab)
    order = np.argsort(-chances, axis=1, kind="stable")  # likeliest first
    guesses, chances = (np.take_along_axis(each, order, axis=1) for each in (guesses, chances))
    begins = np.arange(sequences) * output
    return AcceptanceTrace(pair, prompts, begins, tokens, guesses, np.log(np.maximum(chances, 1e-9)))
