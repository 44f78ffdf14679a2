"""The recipe of `pilotfish train pair`: data, sizes, budgets, rates, seed."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from pilotfish.errors import ParameterError
from pilotfish.train.models import HEAD_DIM, LlamaSize

BYTES_AND_END = 257  # the smallest byte-level vocabulary: every byte, and the end of a text
TARGET = LlamaSize(layers=4, hidden=256, heads=4, kv_heads=2, ffn=768)
DRAFT = LlamaSize(layers=2, hidden=256, heads=4, kv_heads=2, ffn=768)


@dataclass(frozen=True)
class PairRecipe:
    """The defaults make `pycode`. Equal recipes and equal sources make equal pairs on equal machines."""

    sources: tuple[Path, ...] = ()  # files or directories; none: the running Python's standard library
    held_out: tuple[str, ...] = ("asyncio", "email", "http", "unittest")  # packages
    seed: int = 0
    vocab_size: int = 4096
    context: int = 8192  # tokens that the models may attend to
    target: LlamaSize = TARGET
    draft: LlamaSize = DRAFT
    sequence_length: int = 512  # tokens of a training row
    batch_rows: int = 8  # rows of an optimizer step
    target_tokens: int = 3_891_200
    draft_tokens: int = 5_120_000
    sampled_tokens: int = 262_144  # of the target's own text, for the draft to learn from
    learning_rate: float = 4e-3
    draft_learning_rate: float = 2e-3
    checkpoint_every: int = 50  # steps

    def __post_init__(self) -> None:
        self._require(0, 2**32 - 1, "seed", "sampled_tokens")
        self._require(BYTES_AND_END, 65536, "vocab_size")
        self._require(2, self.context, "sequence_length")
        self._require(2, 65536, "batch_rows")
        self._require(self.tokens_per_step, 10**12, "target_tokens", "draft_tokens")
        self._require(1, 10**9, "checkpoint_every")
        for field in ("learning_rate", "draft_learning_rate"):
            if not 0 < getattr(self, field) < 1:
                raise ParameterError(field, getattr(self, field), "a number between 0 and 1")
        for role, size in (("target", self.target), ("draft", self.draft)):
            if min(dataclasses.astuple(size)) < 1 or size.heads % size.kv_heads:
                raise ParameterError(role, size, f"positive sizes, heads of {HEAD_DIM} in whole groups of kv_heads")

    def _require(self, low: int, high: int, *fields: str) -> None:
        for field in fields:
            if not low <= getattr(self, field) <= high:
                raise ParameterError(field, getattr(self, field), f"{low} to {high}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_rows * self.sequence_length

    @property
    def shares_width(self) -> bool:
        """Whether the draft can start from the target's weights."""
        return self.draft.hidden == self.target.hidden

    def to_json(self) -> str:
        """The recipe as JSON text, for the run directory and for comparing."""
        return json.dumps(dataclasses.asdict(self), default=str, indent=2)
