"""With each committed token a head gets a *feature*: the target's projection of its hidden states at the token before.
As in transformers, hidden state k is what layer k gets, without a norm; `FINAL` is the last one after the final
norm."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pilotfish.core.features.features import FINAL as FINAL
from pilotfish.model.heads.executor import HeadExecutor, HeadSetup
from pilotfish.model.heads.target import NOTHING_SAID, TrainedOn

#: Of a head whose own number of them is not said, or that has no use for them.
POSITIONS = 1 << 20
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Projection:
    """What the target makes of its hidden states of a token: `input_norm` [parts * target_hidden] or `fc_norm.{i}`
    [target_hidden], then `fc` [width, parts * target_hidden], then `feature_norm` [width], each where there is one."""

    layers: tuple[int, ...]  # in the order in which they are concatenated; at least one
    width: int  # of a feature
    joined_norm: bool = False  # before fc, over all parts together
    part_norms: bool = False  # before fc, of each part
    fc: bool = True  # False: the one hidden state itself
    bias: bool = False
    feature_norm: bool = False  # after fc
    eps: float = 1e-6

    def shapes(self, target_hidden: int) -> Shapes:
        parts, width = len(self.layers), self.width
        shapes: Shapes = {}
        if self.joined_norm:
            shapes["input_norm.weight"] = (parts * target_hidden,)
        if self.part_norms:
            shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(parts)}
        if self.fc:
            shapes["fc.weight"] = (width, parts * target_hidden)
        if self.fc and self.bias:
            shapes["fc.bias"] = (width,)
        if self.feature_norm:
            shapes["feature_norm.weight"] = (width,)
        return shapes


@dataclass(frozen=True)
class Decoder:
    """The layers of a head, as `shapes` has them; a norm that is absent is the identity."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float = 1e-6
    activation: str = "silu"
    attention_bias: bool = False
    qk_norm: bool = False
    gated_attention: bool = False  # rows of q_proj are, head by head, of queries and of gates: output * sigmoid(gate)
    norm_offset: float = 0.0  # added to the weights of all norms but fc's (Qwen3-Next: 1)
    window: int = 0  # 0: all positions
    #: transformers' `rope_parameters`, maybe with `partial_rotary_factor`.
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    context: int = POSITIONS  # positions that its rope knows

    @property
    def kv_size(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    def shapes(self, *, wide: bool = False) -> Shapes:
        shapes: Shapes = {"norm.weight": (self.hidden,)}
        for i in range(self.layers):
            inner = self._layer_shapes(self.hidden * (2 if wide and i == 0 else 1))
            shapes |= {f"layers.{i}.{name}": shape for name, shape in inner.items()}
        return shapes

    def _layer_shapes(self, columns: int) -> Shapes:
        hidden, size = self.hidden, self.head_dim
        queries, keys = self.heads * size, self.kv_heads * size
        rows = {"q": queries * (2 if self.gated_attention else 1), "k": keys, "v": keys}
        shapes: Shapes = {f"self_attn.{x}_proj.weight": (count, columns) for x, count in rows.items()}
        shapes["self_attn.o_proj.weight"] = (hidden, queries)
        if self.attention_bias:
            shapes |= {f"self_attn.{x}_proj.bias": (count,) for x, count in {**rows, "o": hidden}.items()}
        if self.qk_norm:
            shapes |= {f"self_attn.{x}_norm.weight": (size,) for x in "qk"}
        shapes |= {f"mlp.{x}_proj.weight": (self.ffn, hidden) for x in ("gate", "up")}
        shapes["mlp.down_proj.weight"] = (hidden, self.ffn)
        return shapes | {f"{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}


class HeadMemory(NamedTuple):
    """Counts of numbers of the head's type, beside the weights."""

    slot: int  # in each slot
    row: int  # of each row of a forward, while it runs
    roots: int = 0  # of roots, at most


@dataclass(frozen=True)
class Head(ABC):
    projection: Projection
    shared: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")  # tensors that may be the target's

    @property
    @abstractmethod
    def context(self) -> int:
        """Positions up to which it can guess."""

    @abstractmethod
    def shapes(self, spec: "HeadSpec", vocab: int) -> Shapes:
        """All tensors of such heads, except the projection's. `vocab` is the target's."""

    def optional(self) -> frozenset[str]:
        return frozenset(self.shared)

    @property
    @abstractmethod
    def guesses(self) -> str: ...

    @abstractmethod
    def memory(self) -> HeadMemory: ...

    @abstractmethod
    def executor(self, files: "HeadFiles", setup: HeadSetup) -> HeadExecutor: ...


@dataclass(frozen=True)
class DecoderHead(Head):
    decoder: Decoder

    @property
    def context(self) -> int:
        return self.decoder.context

    def optional(self) -> frozenset[str]:
        return super().optional() | {f"layers.{i}.self_attn.o_proj.bias" for i in range(self.decoder.layers)}

    def shapes(self, spec: "HeadSpec", vocab: int) -> Shapes:
        hidden = self.decoder.hidden
        return {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (spec.draft_vocab, hidden)}

    def memory(self) -> HeadMemory:
        decoder = self.decoder
        return HeadMemory(decoder.kv_size + decoder.hidden, 8 * decoder.hidden + 3 * decoder.ffn)


@dataclass(frozen=True)
class HeadSpec:
    head: Head
    kind: str  # eagle1, eagle3, peagle, mtp, dflash, dspark, medusa: what its publishers call it
    dialect: str  # whose layout its files have
    target_hidden: int
    target_layers: int
    draft_vocab: int  # rows of its lm_head; `d2t` (below) is there if it is less than the target's
    #: The projection's layers in another convention that is published under the same name, where nothing says which.
    other_layers: tuple[int, ...] = ()

    @property
    def projection(self) -> Projection:
        return self.head.projection

    def shapes(self, vocab: int) -> Shapes:
        return self.projection.shapes(self.target_hidden) | self.head.shapes(self, vocab)


@dataclass(frozen=True)
class HeadFiles:
    spec: HeadSpec
    tensors: Mapping[str, Tensor]  # by canonical names, the projection's too
    d2t: Tensor | None  # int64 [draft vocab], the target's id of each draft id; None: they are the same
    digest: str
    trained_on: TrainedOn = NOTHING_SAID

    def executor(self, setup: HeadSetup) -> HeadExecutor:
        return self.spec.head.executor(self, setup)
