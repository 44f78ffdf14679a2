"""The recipe of `pilotfish train pair`, declared once: data, sizes, budgets, rates, seed. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pilotfish.errors import ParameterError
from pilotfish.options import check_options, option

BYTES_AND_END = 257  # the smallest byte-level vocabulary: every byte, and the end of a text
HEAD_DIM = 64
LARGEST = (1 << 32) - 1
HELD_OUT = ("asyncio", "email", "http", "unittest")
#: Code that people wrote, of packages that are there wherever this one is.
PACKAGES = (
    "click",
    "filelock",
    "fsspec",
    "huggingface_hub",
    "jinja2",
    "mpmath",
    "networkx",
    "numpy",
    "opentelemetry",
    "packaging",
    "rich",
    "starlette",
    "sympy",
    "torch",
    "typer",
    "uvicorn",
    "zmq",
)
SIZE_FIELDS = "layers,hidden,heads,kv_heads,ffn"


@dataclass(frozen=True)
class LlamaSize:
    layers: int
    hidden: int  # width of the residual stream
    heads: int
    kv_heads: int
    ffn: int

    @classmethod
    def parse(cls, field: str, text: str) -> LlamaSize:
        """`6,512,8,2,1536` in the order of the fields."""
        try:
            return cls(*map(int, text.split(",")))
        except (TypeError, ValueError) as error:
            raise ParameterError(f"{field}_shape", text, f"five integers {SIZE_FIELDS}") from error

    def __str__(self) -> str:
        return ",".join(map(str, dataclasses.astuple(self)))

    def check(self, field: str) -> None:
        if min(dataclasses.astuple(self)) < 1 or self.heads % self.kv_heads:
            raise ParameterError(field, self, f"positive sizes, heads of {HEAD_DIM} in whole groups of kv_heads")


TARGET = LlamaSize(layers=6, hidden=384, heads=6, kv_heads=2, ffn=1024)
DRAFT = LlamaSize(layers=2, hidden=384, heads=6, kv_heads=2, ffn=1024)
size = partial(option, parse=LlamaSize.parse, metavar=SIZE_FIELDS)
rate = partial(option, above=0, high=1)
source = option("A file or directory of .py files.", names=("--source",), shown="the standard library")


@dataclass(frozen=True)
class PairRecipe:
    """The defaults make `pycode`. Equal recipes and equal sources make equal pairs on equal machines. Without sources
    the running Python's standard library and the packages are taken."""

    sources: Annotated[tuple[Path, ...], source] = ()
    packages: Annotated[tuple[str, ...], option("An installed package.", names=("--package",))] = PACKAGES
    held_out: Annotated[tuple[str, ...], option("A package never trained on.")] = HELD_OUT
    seed: Annotated[int, option("Of models, order and samples.", 0, LARGEST)] = 0
    vocab_size: Annotated[int, option("Tokens of the byte-level BPE.", BYTES_AND_END, 65536)] = 4096
    context: Annotated[int, option("Positions that the models serve.")] = 8192
    target: Annotated[LlamaSize, size("Of the target.", names=("--target-shape",))] = TARGET
    draft: Annotated[LlamaSize, size("Of the draft.", names=("--draft-shape",))] = DRAFT
    sequence_length: Annotated[int, option("Tokens of a training row.", 2, LARGEST)] = 512
    batch_rows: Annotated[int, option("Rows of an optimizer step.", 2, 65536)] = 8
    target_tokens: Annotated[int, option("Tokens the target trains on.", 1, 10**12)] = 24_576_000
    draft_tokens: Annotated[int, option("Tokens the draft is distilled on.", 1, 10**12)] = 2_048_000
    sampled_tokens: Annotated[int, option("Tokens the target writes for the draft.", 0, LARGEST)] = 262_144
    learning_rate: Annotated[float, rate("The target's peak rate.")] = 4e-3
    draft_learning_rate: Annotated[float, rate("The draft's peak rate.")] = 2e-3
    checkpoint_every: Annotated[int, option("Steps between checkpoints.", 1, 10**9)] = 50

    def __post_init__(self) -> None:
        check_options(self)
        if self.sequence_length > self.context:
            raise ParameterError("sequence_length", self.sequence_length, f"at most the context, {self.context}")
        for field in ("target_tokens", "draft_tokens"):
            if getattr(self, field) < self.tokens_per_step:
                raise ParameterError(field, getattr(self, field), f"at least a step's {self.tokens_per_step}")
        self.target.check("target")
        self.draft.check("draft")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_rows * self.sequence_length

    @property
    def shares_width(self) -> bool:
        """Whether the draft can start from the target's weights."""
        return self.draft.hidden == self.target.hidden

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str, indent=2)
