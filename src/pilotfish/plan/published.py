"""A row of `published.toml` `calibrates` a constant of an engine, is `predicted` by constants of other rows or
assumptions, or `lacks` an input. The model's authors knew all rows: predictions are not fitted, but not blind."""

from collections.abc import Iterator
from statistics import mean
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.hardware.cost import KV, ForwardLoad, PlacedModel, Weights, place
from pilotfish.config.hardware.tables import ENGINES, Sourced, look_up, read_table
from pilotfish.plan import rounds

Kind = Literal["calibrates", "predicted", "lacks"]
#: Decoding without guesses, one forward of a speculating engine, rounds of speculation, or none of these.
Mode = Literal["plain", "forward", "sync", "async", "other"]
#: Digits of a prediction that are kept in a file.
DIGITS = 6
#: Quantiles of the errors that bound a band.
QUANTILES = (0.1, 0.9)


# -- what predicts a row


class RunModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    on: str  # model@devicexcount
    engine: str
    weights: Weights = "bf16"
    kv: KV = "bf16"

    @property
    def placed(self) -> PlacedModel:
        engine = look_up(ENGINES, "engine", "engines", self.engine)
        return place(self.on, engine, self.weights, self.kv, field="on")

    def seconds(self, sequences: int, rows: int, context: float) -> float:
        """Of a forward over `rows` rows of each of `sequences`, whose KV of `context` tokens is read once."""
        return self.placed.seconds(ForwardLoad(rows=sequences * rows, sequences=sequences, context=context))


class Inputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="of"):
    def predict(self, unit: str) -> float:
        """`unit`: "ms", "tok/s" of all sequences, or "x", the speed over plain decoding."""
        raise NotImplementedError


class ForwardInputs(Inputs, frozen=True, kw_only=True, tag="forward"):
    """In tokens/s: plain decoding."""

    target: RunModel
    sequences: int = 1
    rows: int = 1
    context: float

    def predict(self, unit: str) -> float:
        seconds = self.target.seconds(self.sequences, self.rows, self.context)
        return 1e3 * seconds if unit == "ms" else self.sequences / seconds


class SyncInputs(Inputs, frozen=True, kw_only=True, tag="sync"):
    target: RunModel
    draft: RunModel
    guesses: int
    forwards: int  # of the draft in a round
    tokens: float  # committed in a round
    sequences: int = 1
    context: float

    def predict(self, unit: str) -> float:
        verify = self.target.seconds(self.sequences, self.guesses + 1, self.context)
        draft = self.draft.seconds(self.sequences, 1, self.context) + self.draft.placed.engine.level.value
        seconds = rounds.sync_round(verify, draft, self.forwards, self.target.placed.engine.round.value)
        plain = self.target.seconds(self.sequences, 1, self.context)
        return self.tokens * (plain if unit == "x" else self.sequences) / seconds


class ChainInputs(Inputs, frozen=True, kw_only=True, tag="chain"):
    acceptance: float
    guesses: int
    cost: float  # of a draft's forward over the target's

    def predict(self, unit: str) -> float:  # noqa: ARG002  # always x
        return rounds.chain_speedup(self.acceptance, self.guesses, self.cost)


class OutcomeCacheInputs(Inputs, frozen=True, kw_only=True, tag="outcome_cache"):
    """Rounds of SSD. In ms: the draft's busy time in one. If one sequence misses, it drafts for all anew."""

    target: RunModel
    draft: RunModel
    guesses: int
    fan_out: int  # outcomes prepared after each number of accepted guesses
    hit: float  # chance of a sequence
    sequences: int
    context: float
    tokens: float = 0.0  # committed in a round; 0 where seconds are asked for

    def predict(self, unit: str) -> float:
        verify = self.target.seconds(self.sequences, self.guesses + 1, self.context)
        answer = self.draft.seconds(self.sequences, self.guesses + 1, self.context)
        level = self.draft.seconds(self.sequences, (self.guesses + 1) * self.fan_out, self.context)
        speculate = rounds.speculate_seconds(answer, level, self.guesses, self.draft.placed.engine.level.value)
        backup, hit = self.guesses * self.draft.seconds(self.sequences, 1, self.context), self.hit**self.sequences
        if unit == "ms":
            return 1e3 * rounds.outcome_cache_round(0.0, speculate, backup, hit, 0.0)
        seconds = rounds.outcome_cache_round(verify, speculate, backup, hit, self.target.placed.engine.round.value)
        return self.sequences * self.tokens / seconds


class RerootedInputs(Inputs, frozen=True, kw_only=True, tag="rerooted"):
    """Rounds of SwiftSpec, as deep as the target has time for."""

    target: RunModel
    draft: RunModel
    rows: int  # that the target verifies
    width: int  # leaves that a level of the draft expands
    survives: float  # chance that the committed token is in the tree
    tokens: float
    context: float

    def predict(self, unit: str) -> float:  # noqa: ARG002  # always tok/s
        verify = self.target.seconds(1, self.rows, self.context)
        level = self.draft.seconds(1, self.width, self.context) + self.draft.placed.engine.level.value
        depth, fixed = rounds.levels_hidden(verify, level), self.target.placed.engine.round.value
        return self.tokens / rounds.rerooted_round(verify, level, depth, self.survives, fixed)


AnyInputs = ForwardInputs | SyncInputs | ChainInputs | OutcomeCacheInputs | RerootedInputs


# -- rows, and the model's errors


class PublishedRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    what: str
    mode: Mode
    unit: str  # of the figure: tok/s, ms, x
    published: float | None = None
    inputs: AnyInputs | None = None  # None: it lacks one
    lacks: str = ""  # what its source does not say
    calibrates: str = ""  # `constant of engine@hardware`, or `tokens`, those of a round
    unverified: tuple[str, ...] = ()
    note: str = ""

    @property
    def kind(self) -> Kind:
        if self.inputs is None:
            return "lacks"
        return "calibrates" if self.calibrates else "predicted"

    @property
    def predicted(self) -> float | None:
        """In `unit`; None where an input lacks."""
        return None if self.inputs is None else float(f"{self.inputs.predict(self.unit):.{DIGITS}g}")

    @property
    def error(self) -> float | None:
        """Relative: 0.1 where the prediction is 10 % too high. None where either lacks."""
        predicted = self.predicted
        return None if predicted is None or self.published is None else predicted / self.published - 1


class PublishedGroup(Sourced, frozen=True, kw_only=True):
    about: str
    rows: dict[str, PublishedRow]


class ErrorSummary(Struct, frozen=True):
    rows: int
    mean: float  # absolute and relative
    most: float


GROUPS = read_table(__file__, "published", dict[str, PublishedGroup])
RUNS = read_table(__file__, "runs", dict[str, AnyInputs])
PUBLISHED = {name: replace(row, inputs=RUNS.get(name)) for group in GROUPS.values() for name, row in group.rows.items()}


class ErrorBand(Struct, frozen=True, kw_only=True):
    """A rate is `low` to `high` times the model's in eight of ten predicted rows."""

    rows: int
    low: float
    high: float


def error_band(*modes: Mode) -> ErrorBand:
    """Rows of times count by the rates that they imply."""
    ratios = [(1 + error) if row.unit == "ms" else 1 / (1 + error) for row, error in _errors() if row.mode in modes]
    low, high = np.quantile(ratios, QUANTILES)
    return ErrorBand(rows=len(ratios), low=float(low), high=float(high))


def summaries() -> dict[Mode, ErrorSummary]:
    errors: dict[Mode, list[float]] = {}
    for row, error in _errors():
        errors.setdefault(row.mode, []).append(abs(error))
    return {mode: ErrorSummary(len(of), mean(of), max(of)) for mode, of in errors.items()}


def _errors() -> Iterator[tuple[PublishedRow, float]]:
    for row in PUBLISHED.values():
        if row.kind == "predicted" and row.error is not None:
            yield row, row.error
