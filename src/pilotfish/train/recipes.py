"""Imports no torch."""

import dataclasses
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pilotfish.config.fields import layer_ids
from pilotfish.errors import ParameterError
from pilotfish.options import Option, check_options, option, pick

HeadKind: TypeAlias = Literal["eagle3", "dspark", "mtp", "medusa"]

BYTES_AND_END = 257  # the smallest byte-level vocabulary: every byte, and the end of a text
HEAD_DIM = 64
LARGEST = (1 << 32) - 1
#: The shortest rows that a target writes for a draft: it continues prompts of half of that.
LEAST_LENGTH = 128
HELD_OUT = ("asyncio", "email", "http", "unittest")
#: Code that people wrote, of packages that are there wherever this one is.
PACKAGES = (
    *("click", "filelock", "fsspec", "huggingface_hub", "jinja2", "mpmath", "networkx", "numpy", "opentelemetry"),
    *("packaging", "rich", "starlette", "sympy", "torch", "typer", "uvicorn", "zmq"),
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
    def parse(cls, field: str, text: str) -> "LlamaSize":
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
budget = partial(option, low=1, high=10**12)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Equal recipes, sources and data make equal models on equal machines."""

    sources: Annotated[
        tuple[Path, ...],
        option("A file or directory of .py files.", names=("--source",), shown="the standard library"),
    ] = ()
    packages: Annotated[tuple[str, ...], option("An installed package.", names=("--package",))] = PACKAGES
    held_out: Annotated[tuple[str, ...], option("A package never trained on.")] = HELD_OUT
    seed: Annotated[int, option("Of initialisation, order and samples.", 0, LARGEST)] = 0
    sequence_length: Annotated[int, option("Tokens of a training row.", LEAST_LENGTH, LARGEST)] = 128
    batch_rows: Annotated[int, option("Rows of an optimizer step.", 2, 65536)] = 8
    learning_rate: Annotated[float, rate("The peak rate.")] = 8e-3
    checkpoint_every: Annotated[int, option("Steps between checkpoints.", 1, 10**9)] = 50

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_rows * self.sequence_length

    def check_budget(self, field: str) -> None:
        if getattr(self, field) < self.tokens_per_step:
            raise ParameterError(field, getattr(self, field), f"at least a step's {self.tokens_per_step}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str, indent=2)


@dataclass(frozen=True, kw_only=True)
class PairRecipe(Recipe):
    vocab_size: Annotated[int, option("Tokens of the byte-level BPE.", BYTES_AND_END, 65536)] = 4096
    context: Annotated[int, option("Positions that the models serve.")] = 8192
    target: Annotated[LlamaSize, size("Of the target.", names=("--target-shape",))] = TARGET
    draft: Annotated[LlamaSize, size("Of the draft.", names=("--draft-shape",))] = DRAFT
    sequence_length: Annotated[int, option("Tokens of a training row.", 2, LARGEST)] = 512
    target_tokens: Annotated[int, budget("Tokens the target trains on.")] = 24_576_000
    draft_tokens: Annotated[int, budget("Tokens the draft is distilled on.")] = 2_048_000
    sampled_tokens: Annotated[int, option("Tokens the target writes for the draft.", 1, LARGEST)] = 262_144
    learning_rate: Annotated[float, rate("The target's peak rate.")] = 4e-3
    draft_learning_rate: Annotated[float, rate("The draft's peak rate.")] = 2e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length > self.context:
            raise ParameterError("sequence_length", self.sequence_length, f"at most the context, {self.context}")
        self.check_budget("target_tokens")
        self.check_budget("draft_tokens")
        self.target.check("target")
        self.draft.check("draft")


@dataclass(frozen=True, kw_only=True)
class TaughtRecipe(Recipe):
    """Without data and sources the text is that of `train pair`."""

    target: Path
    data: Annotated[tuple[Path, ...], option("A JSON Lines file of texts or prompts.", shown="none")] = ()
    tokens: Annotated[int, budget("Tokens that the draft trains on.")] = 1_024_000
    sampled_tokens: Annotated[
        int, option("Tokens that the target writes; 0: data is its own text.", 1, LARGEST, or_zero=True)
    ] = 262_144
    temperature: Annotated[float, option("At which it writes them.", 0, 10)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_budget("tokens")


@dataclass(frozen=True, kw_only=True)
class DistilRecipe(TaughtRecipe):
    """The draft starts from a model, or as a new Llama of a shape. With `captured` rows there is no other text."""

    captured: Annotated[
        tuple[Path, ...],
        option("A folder of token ids that a server kept (--capture).", names=("--from",), shown="none"),
    ] = ()
    learning_rate: Annotated[float, rate("The peak rate.")] = 2e-3
    draft: Path | None = None
    shape: LlamaSize | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.captured and (self.data or self.sources):
            raise ParameterError("from", " ".join(map(str, self.captured)), "none with --data or --source")
        if self.captured and self.draft is None:
            raise ParameterError("draft", str(self.shape), "the directory of the present draft with --from")
        if self.shape is not None:
            self.shape.check("draft")


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(TaughtRecipe):
    kind: HeadKind = "eagle3"
    depth: Annotated[int, option("Tokens of the chains that it is trained to guess.", 1, 32)] = 4
    layers: Annotated[int, option("Of the head (medusa: residual blocks of each depth).", 1, 16)] = 1
    feature_layers: Annotated[
        tuple[int, ...],
        option("Of the target: whose inputs it sees.", parse=layer_ids, metavar="1,2,3", shown="low, middle, high"),
    ] = ()
    draft_vocab: Annotated[int, option("Its tokens, the most frequent ones; 0: all.", 16, LARGEST, or_zero=True)] = 0
    anchors: Annotated[int, option("Blocks in a training row, of dspark.", 1, 4096)] = 64
    lean: Annotated[bool, option("Write no embedding and output layer that are the target's.", shown="off")] = False
    markov_rank: Annotated[int, option("Of dspark's correction by the token before.", 1, 4096)] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > 1 and self.kind in ("eagle3", "mtp"):
            raise ParameterError("layers", self.layers, f"1 of {self.kind}")


#: Defaults of its own: chosen by measurement on `pycode`, docs/training.md.
OF_DSPARK = {"depth": 5, "layers": 2}


def head_options() -> list[Option]:
    return [
        replace(one, default=None, extra={**one.extra, "shown": f"{one.default}; dspark: {OF_DSPARK[one.name]}"})
        if one.name in OF_DSPARK
        else one
        for one in pick(HeadRecipe)
    ]


def head_recipe(kind: str, **given: Any) -> HeadRecipe:
    """ParameterError for an unknown kind."""
    if kind not in get_args(HeadKind):
        raise ParameterError("kind", kind, " or ".join(get_args(HeadKind)))
    return HeadRecipe(**{**(OF_DSPARK if kind == "dspark" else {}), **given, "kind": kind})
