"""The recipes of `pilotfish train head` and `train distil`, declared once. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pilotfish.errors import ParameterError
from pilotfish.options import Option, check_options, option, pick
from pilotfish.train.recipe import HELD_OUT, LARGEST, PACKAGES, LlamaSize, rate, source

HeadKind: TypeAlias = Literal["eagle3", "dspark", "mtp", "medusa"]
#: The shortest prompt that a target continues when it writes text for a draft.
LEAST_LENGTH = 128


def _layers(field: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise ParameterError(field, text, "integers with commas between them, as in 1,2,3") from error


@dataclass(frozen=True)
class TaughtRecipe:
    """How a draft is taught what a target would say. Equal recipes, targets and data make equal drafts on equal
    machines. Without data and sources the text is that of `train pair`."""

    target: Path
    data: Annotated[tuple[Path, ...], option("A JSON Lines file of texts or prompts.", shown="none")] = ()
    sources: Annotated[tuple[Path, ...], source] = ()
    packages: Annotated[tuple[str, ...], option("An installed package.", names=("--package",))] = PACKAGES
    held_out: Annotated[tuple[str, ...], option("A package never trained on.")] = HELD_OUT
    seed: Annotated[int, option("Of the draft, order and samples.", 0, LARGEST)] = 0
    sequence_length: Annotated[int, option("Tokens of a training row.", LEAST_LENGTH, LARGEST)] = 128
    batch_rows: Annotated[int, option("Rows of an optimizer step.", 2, 65536)] = 8
    tokens: Annotated[int, option("Tokens that the draft trains on.", 1, 10**12)] = 1_024_000
    sampled_tokens: Annotated[int, option("Tokens that the target writes.", 1, LARGEST)] = 262_144
    temperature: Annotated[float, option("At which it writes them.", 0, 10)] = 1.0
    learning_rate: Annotated[float, rate("The peak rate.")] = 8e-3
    checkpoint_every: Annotated[int, option("Steps between checkpoints.", 1, 10**9)] = 50

    def __post_init__(self) -> None:
        check_options(self)
        if self.tokens < self.tokens_per_step:
            raise ParameterError("tokens", self.tokens, f"at least a step's {self.tokens_per_step}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_rows * self.sequence_length

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str, indent=2)


@dataclass(frozen=True)
class DistilRecipe(TaughtRecipe):
    """The draft starts from a model that is there, or as a new Llama of a shape. `captured` rows are all the text that
    there is, and the draft one that is there: the present one."""

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


@dataclass(frozen=True)
class HeadRecipe(TaughtRecipe):
    """`head_recipe` has each kind's own defaults."""

    kind: HeadKind = "eagle3"
    depth: Annotated[int, option("Tokens of the chains that it is trained to guess.", 1, 32)] = 4
    layers: Annotated[int, option("Of the head (medusa: residual blocks of each depth).", 1, 16)] = 1
    feature_layers: Annotated[
        tuple[int, ...],
        option("Of the target: whose inputs it sees.", parse=_layers, metavar="1,2,3", shown="low, middle, high"),
    ] = ()
    draft_vocab: Annotated[int, option("Its tokens, the most frequent ones; 0: all.", 16, LARGEST, or_zero=True)] = 0
    anchors: Annotated[int, option("Blocks in a training row, of dspark.", 1, 4096)] = 64
    lean: Annotated[bool, option("Write no embedding and output layer that are the target's.", shown="off")] = False
    markov_rank: Annotated[int, option("Of dspark's correction by the token before.", 1, 4096)] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > 1 and self.kind in ("eagle3", "mtp"):
            raise ParameterError("layers", self.layers, f"1 of {self.kind}")


#: What sets the kinds apart: chosen by measurement on `pycode`.
OF_KIND: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {},
    "mtp": {},
    "dspark": {"depth": 5, "layers": 2},
    "medusa": {},
}


def head_options() -> list[Option]:
    """Those of `train head`. Where kinds differ their defaults are shown, and left to `head_recipe`."""
    return [_of_kinds(one) for one in pick(HeadRecipe)]


def _of_kinds(one: Option) -> Option:
    values = {kind: own[one.name] for kind, own in OF_KIND.items() if one.name in own}
    if not values:
        return one
    shown = "; ".join([str(one.default), *(f"{kind}: {value}" for kind, value in values.items())])
    return replace(one, default=None, extra={**one.extra, "shown": shown})


def head_recipe(kind: str, **given: Any) -> HeadRecipe:
    """The recipe of a kind, but for what is given. ParameterError for a kind that there is not."""
    if kind not in OF_KIND:
        raise ParameterError("kind", kind, " or ".join(get_args(HeadKind)))
    return HeadRecipe(**{**OF_KIND[kind], **given, "kind": kind})
