"""What a trained head is, whoever published it: one record for each family, and the names that its tensors have here.

Four families. All get, with each committed token, a *feature*: what the target's projection makes of its hidden states
at the token before.

    recurrent   EAGLE-1, EAGLE-2, EAGLE-3, MTP: a row is (feature of t, token t + 1) and gives logits of t + 2. Its own
                state takes the place of the feature in the rows below it.
    masked      P-EAGLE: EAGLE-3's rows, and below a root, in the same forward, rows of a mask: each gives a level.
    block       DFlash, DSpark: features are context; one forward over [anchor, mask, …] gives every slot of a block.
    parallel    Medusa: several heads over one feature, one for each depth.

Hidden states are counted as transformers' `hidden_states` are: k is the residual stream before layer k (0: the
embeddings; the number of layers: after all of them), without a norm. `FINAL` is the last one after the model's final
norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from pilotfish.core.features.features import FINAL as FINAL
from pilotfish.model.heads.trained_on import NOTHING_SAID, TrainedOn

#: Of a head whose own number of them is not said, or that has no use for them.
POSITIONS = 1 << 20


@dataclass(frozen=True)
class Projection:
    """What the target makes of its hidden states of a token. Its tensors stay with the target:

    `input_norm.weight` [parts * target_hidden]         with `joined_norm`
    `fc_norm.{i}.weight` [target_hidden]                with `part_norms`
    `fc.weight` [width, parts * target_hidden], `fc.bias`   with `fc` and `bias`
    `feature_norm.weight` [width]                       with `feature_norm`: DFlash's and DSpark's `hidden_norm`
    """

    layers: tuple[int, ...]  # in the order in which they are concatenated; at least one
    width: int  # of a feature
    joined_norm: bool = False  # before fc, over all parts together
    part_norms: bool = False  # before fc, of each part
    fc: bool = True  # False: the one hidden state itself
    bias: bool = False
    feature_norm: bool = False  # after fc
    eps: float = 1e-6


@dataclass(frozen=True)
class Decoder:
    """The layers of a head. Canonical tensors, for layer i:

    `layers.{i}.self_attn.{q,k,v,o}_proj.weight` (and `.bias` with `attention_bias`),
    `layers.{i}.self_attn.{q,k}_norm.weight` with `qk_norm`, `layers.{i}.mlp.{gate,up,down}_proj.weight`,
    `layers.{i}.input_layernorm.weight` (absent: identity), `layers.{i}.post_attention_layernorm.weight`,
    `norm.weight` (absent: identity).
    """

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


@dataclass(frozen=True)
class RecurrentHead:
    """A feature h and the embedding e of the token after it, as layer 0 gets them:

    wide     attention over [input_layernorm(e), hidden_norm(h)], 2 * hidden wide; the residual is h, or hidden_norm(h)
             with `residual_normed` (EAGLE-3). Tensor `hidden_norm.weight`.
    joined   x = input_proj([e, h]) or, with `hidden_first`, input_proj([h, e]); e and h normed before by
             `embed_norm.weight` and `hidden_norm.weight` where those exist (EAGLE-1, MTP). Tensor `input_proj.weight`
             [hidden, 2 * hidden], maybe `input_proj.bias`.

    Besides: `embed_tokens.weight` [vocab, hidden] where the head has its own, else the target's; `lm_head.weight`
    [draft vocab, hidden] likewise.
    """

    projection: Projection
    decoder: Decoder
    entry: Literal["wide", "joined"]
    residual_normed: bool = False
    hidden_first: bool = False
    recycles_normed: bool = False  # whether the state that rows below get is the one after `norm`
    zero_first_embedding: bool = False  # that of position 0


@dataclass(frozen=True, kw_only=True)
class MaskedHead(RecurrentHead):
    """P-EAGLE. Rows of known tokens are a recurrent head's. Those of tokens to come have the embedding of `mask_token`
    and, in place of a feature, the projection of `mask_hidden` [1, 1, parts * target_hidden]. They see what is above
    them, the masks too, and no state is recycled."""

    depth: int  # tokens that one forward gives below a root, at least 2: the root's own row gives the first
    mask_token: int


@dataclass(frozen=True)
class BlockHead:
    """Slots of a block see each other and all context; K and V of context are projected from features, without a norm
    before. Markov: logits of slot k += W2 W1[token of slot k - 1], `markov.w1.weight` and `markov.w2.weight`
    [vocab, rank]; `gated` also `markov.gate.{weight,bias}`. Confidence: `confidence.weight` [1, hidden (+ rank)],
    `confidence.bias`."""

    projection: Projection
    decoder: Decoder
    block: int  # rows of its forward, the anchor included
    mask_token: int
    anchored: (
        bool  # True: slot k gives the token after position k (DSpark); False: the token at it, slot 0 none (DFlash)
    )
    causal: bool = False
    markov_rank: int = 0  # 0: none
    markov: Literal["plain", "gated"] = "plain"
    confidence: Literal["", "hidden", "markov"] = ""  # what it looks at; "": there is none


@dataclass(frozen=True)
class ParallelHead:
    """Medusa. Head i, from 0: `heads.{i}.blocks.{j}.{weight,bias}` [hidden, hidden], x + silu(W x + b) each, then
    `heads.{i}.lm_head.weight` [draft vocab, hidden]."""

    projection: Projection  # the final normed state itself
    hidden: int
    heads: int
    blocks: int
    bias: bool = True


Head = RecurrentHead | BlockHead | ParallelHead


@dataclass(frozen=True)
class HeadSpec:
    """A head as `model/heads/files.py` reads it."""

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

    @property
    def context(self) -> int:
        """Positions up to which it can guess."""
        return POSITIONS if isinstance(self.head, ParallelHead) else self.head.decoder.context

    @property
    def shift_unsure(self) -> bool:
        return bool(self.other_layers)


@dataclass(frozen=True)
class HeadFiles:
    """A head, read."""

    spec: HeadSpec
    tensors: Mapping[str, Tensor]  # by canonical names, the projection's too
    d2t: Tensor | None  # int64 [draft vocab], the target's id of each draft id; None: they are the same
    digest: str
    trained_on: TrainedOn = NOTHING_SAID
