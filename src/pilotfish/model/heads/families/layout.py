from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pilotfish.errors import ModelError
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.spec import FINAL, POSITIONS, Decoder, Head, HeadSpec
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.loading.configuration import ACTIVATIONS
from pilotfish.model.loading.tensors import TensorHeader

_ATTENTIONS = ("full_attention", "sliding_attention")
#: Layers of a head, at most.
_DEEPEST = 256
#: Buffers in the files of some trainers, which say nothing that the configuration does not.
_BUFFERS = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class HeadSource:
    fields: HeadFields
    headers: Mapping[str, TensorHeader]
    target: TargetFacts
    layers: tuple[int, ...] | None = None  # told from outside: no default is looked for

    def refused(self, reason: str) -> ModelError:
        return ModelError(f"head: {self.fields.path.parent} {reason}")

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers[name].shape if name in self.headers else ()

    def names(self, beginnings: Mapping[str, str]) -> dict[str, str]:
        """Names in the files by canonical ones. The first of `beginnings` that begins a name is replaced by what stands
        there; "" drops the tensor."""
        names: dict[str, str] = {}
        for name in self.headers:
            theirs = next((beginning for beginning in beginnings if name.startswith(beginning)), "")
            if name.endswith(_BUFFERS) or (theirs and not beginnings[theirs]):
                continue
            ours = beginnings.get(theirs, "") + name[len(theirs) :]
            if ours in names:
                raise self.refused(f"has two tensors for one: {names[ours]} and {name}")
            names[ours] = name
        return names

    def open_wrapper(self, kind: str) -> HeadFields:
        fields = self.fields
        fields.choice("speculators_model_type", (kind,), kind)
        fields.within("speculators_config").values()
        return fields.within("transformer_layer_config")

    def vocabulary(self, fields: HeadFields) -> int:
        """Rows of the head's lm_head. ModelError for another target's vocabulary."""
        vocab, listed = self.check_vocabulary(fields), self.shape("d2t")
        if self.fields.take("draft_vocab_size") is None:
            return listed[0] if listed else vocab
        count = self.fields.count("draft_vocab_size")
        if count > vocab:
            raise self.fields.refused("draft_vocab_size", f"at most {vocab}, the target's vocabulary")
        return count

    def check_vocabulary(self, fields: HeadFields) -> int:
        vocab = self.target.vocab
        if (own := fields.count("vocab_size", vocab)) != vocab:
            raise self.refused(f"is of a vocabulary of {own}; its target {self.target.directory} has {vocab}")
        return vocab

    def check_target(self, hidden: int, layers: HeadFields | None = None) -> None:
        """ModelError for a target of another width, or another number of layers if `layers` says one."""
        target = self.target
        if hidden != target.hidden:
            raise self.refused(f"is of a target of hidden size {hidden}; {target.directory} has {target.hidden}")
        if layers is not None and layers.count("num_target_layers", target.layers) != target.layers:
            raise layers.refused("num_target_layers", f"{target.layers}, the layers of {target.directory}")

    def hidden_ids(self, fields: HeadFields, name: str, *, outputs: bool, normed: bool = False) -> tuple[int, ...]:
        """Numbers of hidden states: layer i + 1 gets the output of layer i. `normed`: the last output is after the
        final norm."""
        ids, target = fields.ids(name), self.target
        assert ids is not None
        shifted = tuple(i + outputs for i in ids)
        if not all(0 <= i <= target.layers for i in shifted):
            raise fields.refused(
                name, f"layers {-outputs} to {target.layers - outputs} of a target with {target.layers}"
            )
        return tuple(FINAL if normed and i == target.layers else i for i in shifted)

    def default_ids(self) -> tuple[int, ...]:
        """EAGLE-3's former default: what layers 2, n // 2 and n - 3 get."""
        count = self.target.layers
        if self.layers is not None:
            return self.layers
        if count < 6:
            raise self.refused(
                f"names no layers, and its target has {count}: too few for the default of 2, n // 2, n - 3"
            )
        return (2, count // 2, count - 3)

    def laid_out(
        self,
        head: Head,
        kind: str,
        dialect: str,
        names: Mapping[str, str],
        draft_vocab: int,
        other_layers: tuple[int, ...] = (),
        **about: Any,
    ) -> "HeadLayout":
        spec = HeadSpec(head, kind, dialect, self.target.hidden, self.target.layers, draft_vocab, other_layers)
        return HeadLayout(spec, names, **about)


@dataclass(frozen=True)
class HeadLayout:
    spec: HeadSpec
    names: Mapping[str, str]  # of tensors in the files, by canonical name; `d2t`, `t2d`, `token_map` too
    absent: frozenset[str] = frozenset()  # canonical names of tensors that this layout does without
    of_target: bool = False  # whether the configuration is a whole model's, much of which is not about the head


ReadLayout: TypeAlias = Callable[[HeadSource], HeadLayout]


def read_decoder(
    fields: HeadFields,
    names: Mapping[str, str],
    *,
    layers: int = 0,
    window: int | None = None,
    norm_offset: float = 0.0,
) -> Decoder:
    """`names` (by canonical name) fill in for the configuration."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = layers or read_depth(fields)
    fields.only("mlp_bias", False, "linear layers without a bias")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refused("num_key_value_heads", f"a divisor of {heads}, its num_attention_heads")
    if window is None:
        window = read_window(fields, layers)
    head_dim = fields.count("head_dim", max(hidden // heads, 1))
    return Decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=fields.count("intermediate_size"),
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        attention_bias=fields.flag("attention_bias", "layers.0.self_attn.q_proj.bias" in names),
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        norm_offset=norm_offset,
        window=window,
        rope=read_rope(fields, window, head_dim),
        context=fields.count("max_position_embeddings", POSITIONS),
    )


def read_depth(fields: HeadFields) -> int:
    return fields.count("num_hidden_layers", 1, most=_DEEPEST)


def read_window(fields: HeadFields, layers: int) -> int:
    """The window of all layers; 0: none. As in transformers, a `sliding_window` alone means nothing."""
    window, used = fields.take("sliding_window"), fields.flag("use_sliding_window", False)
    kinds = fields.take("layer_types")
    if kinds is None:
        first = fields.count("max_window_layers", 0, least=0) if used else layers
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    elif not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _ATTENTIONS for kind in kinds):
        raise fields.refused("layer_types", f"full_attention or sliding_attention, for {layers} layers")
    if len(set(kinds)) > 1:
        raise fields.refused("layer_types", "one kind for all layers")
    if kinds[0] == "full_attention":
        return 0
    return fields.count("sliding_window", window)


def with_layers(spec: HeadSpec, layers: tuple[int, ...]) -> HeadSpec:
    head = replace(spec.head, projection=replace(spec.projection, layers=layers))
    return replace(spec, head=head, other_layers=())


# -- a rotary embedding, as transformers' `rope_parameters`, all of whose numbers are checked

#: Numbers that each kind needs, of those whose angles are those of the position alone.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
#: Numbers that it may have, all above 0.
_NUMBERS = (
    *("factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
)


def read_rope(fields: HeadFields, window: int, head_dim: int) -> dict[str, Any]:
    scaling = _place(fields, window)
    rope = {name: value for name, value in scaling.values().items() if not isinstance(value, dict | list)}
    rope.pop("type", None)
    kind = scaling.take("type") or scaling.take("rope_type") or "default"
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise scaling.refused("rope_type", f"one of {', '.join(_NEEDED)}")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        raise (scaling if scaling.has("rope_theta") else fields).refused("rope_theta", "a number above 1")
    _check_numbers(scaling, kind)
    partial = _rotated(fields, scaling, head_dim)
    for name in ("mrope_section", "mrope_interleaved", "partial_rotary_factor"):  # the first two are of images
        rope.pop(name, None)
    rope |= {"rope_type": kind, "rope_theta": theta}
    return rope if partial == 1.0 else {**rope, "partial_rotary_factor": partial}


def _place(fields: HeadFields, window: int) -> HeadFields:
    newer = fields.within("rope_parameters")
    for kind in ("sliding_attention", "full_attention"):  # transformers may keep them by kind of layer
        if newer.has(kind):
            other = newer.within(kind)
            newer = other if (kind == "sliding_attention") == bool(window) else newer
    older = fields.within("rope_scaling")
    return newer if newer.has("rope_theta") or newer.has("rope_type") else older


def _check_numbers(scaling: HeadFields, kind: str) -> None:
    for name in _NEEDED[kind]:
        if not scaling.has(name):
            raise scaling.refused(name, f"a number above 0, which {kind} needs")
    for name in _NUMBERS:
        scaling.number(name, 1.0)
    for name in ("mscale", "mscale_all_dim"):
        if scaling.take(name) != 0:  # as good as none
            scaling.number(name, 1.0)


def _rotated(fields: HeadFields, scaling: HeadFields, head_dim: int) -> float:
    partial = fields.number("partial_rotary_factor", scaling.number("partial_rotary_factor", 1.0))
    if partial > 1 or int(head_dim * partial) < 2:
        holder = fields if fields.has("partial_rotary_factor") else scaling
        raise holder.refused("partial_rotary_factor", f"at most 1, and enough for 2 of the {head_dim} of a head")
    return partial
