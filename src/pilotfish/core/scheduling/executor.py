"""The interface of policy and devices: rows of many sequences go in, tokens come out. Plain arrays on both sides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pilotfish.core.features.features import Features
from pilotfish.core.sampling.constraint import Bits
from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.trees.tree import Floats, Ints, TokenTree


@dataclass(frozen=True)
class NodeRows:
    """Tree nodes that get a row each, parents first. Other ancestors were computed earlier: only their slots matter."""

    tokens: Ints  # [n]
    depths: Ints  # [n], from 1
    paths: NDArray[np.int32]  # [n, deepest], slots from below the root down to the node's own, then anything

    @classmethod
    def of(cls, tree: TokenTree, slots: NDArray[np.int32]) -> "NodeRows":
        """All of `tree`, in its `slots` [len(tree)]."""
        return cls(tree.tokens, tree.depths, tree.along_paths(slots)) if len(tree) else NO_NODES

    def __len__(self) -> int:
        return len(self.tokens)

    def span(self, first: int, end: int) -> "NodeRows":
        return NodeRows(self.tokens[first:end], self.depths[first:end], self.paths[first:end])

    @property
    def deepest(self) -> int:
        return int(self.paths.shape[1])

    @property
    def slots(self) -> NDArray[np.int32]:
        """[n]"""
        own: NDArray[np.int32] = self.paths[np.arange(len(self)), self.depths - 1]
        return own


NO_NODES = NodeRows(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.int32))


class SequenceRows(Struct, frozen=True):
    """One sequence's rows: committed tokens [start, start + len(tokens)), then nodes of a tree.

    position   0 ...... start ...... prefix - 1 | prefix ......
    slots      prefix_slots                     | nodes.paths
    rows                [ tokens .............. | nodes ...... ]
    """

    start: int
    tokens: Sequence[int]  # -1 - i: what sample i of the forward before gives, which `Launched` says may be named
    prefix_slots: NDArray[np.int32]  # [start + len(tokens)], any slot where no row sees the position
    nodes: NodeRows
    kept: Sequence[int]  # offsets in `tokens`, ascending, of rows whose logits are wanted; those of nodes always are
    features: Features | None = None  # [len(tokens), width], the one before each token; for trained heads only

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.nodes)

    @property
    def most(self) -> int:
        """Tokens that a row sees, at most."""
        return len(self.prefix_slots) + self.nodes.deepest


class TokenMasks:
    """Which tokens may follow some samples; after others all may."""

    def __init__(self, samples: Ints, start: Callable[[], Callable[[], Bits]]) -> None:
        """`samples` [m]: their indices. `start` begins to compute the masks; its result waits for them."""
        self.samples = samples
        self._start = start
        self._wait: Callable[[], Bits] | None = None

    def begin(self) -> None:
        """Call it when the device is about to be busy for a while."""
        if self._wait is None:
            self._wait = self._start()

    def bits(self) -> Bits:
        """[m, words]"""
        self.begin()
        assert self._wait is not None
        return self._wait()

    def of(self, samples: Ints) -> "TokenMasks | None":
        chosen = np.isin(self.samples, samples)
        if not chosen.any():
            return None
        places = np.searchsorted(samples, self.samples[chosen])
        return TokenMasks(places, lambda: lambda: np.ascontiguousarray(self.bits()[chosen]))


class SharedTokens(Struct, frozen=True):
    """Tokens that a draft can give to a target with another vocabulary, whose ids noise, masks and rules use."""

    ids: Ints  # [m], the target's, ascending
    columns: Ints  # [m], the draft's own


class Sampling(Struct, frozen=True):
    """How tokens are drawn. Samples of a sequence share its parameters and seed."""

    rows: Ints | None  # [samples], which of the kept rows; None: all in order. Requests of one prompt share a row
    params: Sequence[SamplingParams]  # [sequences]
    seeds: Sequence[int]  # [sequences]
    sequences: Ints  # [samples], whose parameters and seed
    positions: Ints  # [samples], index in its sequence, prompt included, of the token that the row gives
    edits: Sequence[LogitEdits | None] = ()  # [samples], or empty: no sequence has rules on logits
    masks: TokenMasks | None = None  # None: all tokens may be given. They come before the edits
    children: int = 0  # 0: draw the token; k: the k tokens that are likeliest to be drawn, and their chances
    vocabularies: Sequence[
        SharedTokens | None
    ] = ()  # [sequences] of other ids than the model's; or empty: there is none

    def __len__(self) -> int:
        return len(self.sequences)

    def of(self, samples: Ints) -> "Sampling":
        """Of some samples, ascending, all of one vocabulary, which is left out."""
        rows = samples if self.rows is None else self.rows[samples]
        edits = [self.edits[sample] for sample in samples.tolist()] if self.edits else ()
        masks = None if self.masks is None else self.masks.of(samples)
        places = self.sequences[samples], self.positions[samples]
        return Sampling(rows, self.params, self.seeds, *places, edits, masks, self.children)

    @property
    def greedy(self) -> NDArray[np.bool_]:
        """[samples]"""
        return np.array([params.greedy for params in self.params], np.bool_)[self.sequences]


NO_SAMPLING = Sampling(None, (), (), np.zeros(0, np.int64), np.zeros(0, np.int64))


class ForwardSeconds(Struct, frozen=True):
    """Seconds of a forward's parts; a pace counts as the model's."""

    model: float = 0.0
    sample: float = 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Under the model's own distribution: raw logits, temperature 1, no filters."""

    token: int
    logprob: float
    rank: int  # 1: no token is likelier
    top: tuple[tuple[int, float], ...]  # the n likeliest tokens and their log-probabilities, likeliest first


def _no_logprobs(rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    raise NotImplementedError("this executor reports no log-probabilities")


class Outcome(Struct, frozen=True):
    tokens: Ints  # [samples], NO_TOKEN after rows whose logits are not finite; [samples, k] with children
    log_chances: Floats | None = None  # [samples, k] with children: -inf where fewer than k tokens are possible
    broken: Sequence[int] = ()  # kept rows whose logits are not finite
    #: (kept rows, a token after each, n) -> log-probabilities of the tokens and of the n likeliest, raw logits.
    logprobs: Callable[[Sequence[int], Sequence[int], int], list[TokenLogprobs]] = _no_logprobs
    seconds: ForwardSeconds = ForwardSeconds()


ANY_DEPTH = 1 << 30  # deeper than any tree


class Executor(Protocol):
    @property
    def num_slots(self) -> int: ...

    @property
    def context(self) -> int:
        """Positions that the model knows."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def deepest(self) -> int:
        """Nodes at this depth get no children: a trained head may guess no further."""

    def padded(self, rows: int) -> int:
        """Rows that the device runs for a forward of `rows`."""

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        """Write KV of all rows and sample. Kept rows count by sequence: committed rows in `kept`, then its nodes."""


class Launched(Protocol):
    """A forward that computes."""

    @property
    def leaves_tokens(self) -> bool:
        """Whether rows of the next forward may name its samples before `collect`."""

    def collect(self) -> Outcome:
        """Once, and before what was launched after it."""


class LaunchingExecutor(Executor, Protocol):
    def launch(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Launched:
        """`execute`, without a wait for the outcome."""


class LayerProgress:
    """Layers whose KV is there for all rows of the forward at hand. Only the computing thread calls `written`."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.written: NDArray[np.int32] = np.zeros(1, np.int32)
        self._began = self._seconds = 0.0

    def wrote(self, layer: int) -> None:
        self.written[0] = layer + 1

    def hold(self, began: float, seconds: float) -> None:
        """A layer counts as there only when a device of this pace would have computed it."""
        self._began, self._seconds = began, seconds

    def reset(self) -> None:
        """No forward is at hand. Call it before others may ask about the next one."""
        self.written[0] = 0
        self._seconds = 0.0

    def at(self, now: float) -> int:
        written = int(self.written[0])
        if not self._seconds:
            return written
        return min(written, int(self.layers * (now - self._began) / self._seconds))
