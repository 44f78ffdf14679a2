"""z-lab's layout is SpecForge's and Model-Optimizer's too. Files rarely say whether a block's first slot, the anchor's,
gives a token: DSpark's does, DFlash's does not."""

from typing import Literal

from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.families.layout import HeadLayout, HeadSource, read_decoder, read_depth, read_window
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.spec import Decoder, Projection

#: speculators' names.
NAMES = {
    "hidden_norm.": "feature_norm.",
    "markov_head.markov_w1.": "markov.w1.",
    "markov_head.markov_w2.": "markov.w2.",
    "markov_head.gate_proj.": "markov.gate.",
    "confidence_head.proj.": "confidence.",
}
#: Model-Optimizer's, and those of SpecForge's early files.
_OTHERS = {
    "markov_w1.": "markov.w1.",
    "markov_w2.": "markov.w2.",
    "gate_proj.": "markov.gate.",
    "confidence_proj.": "confidence.",
    **{f"logit_head.{name}": ours for name, ours in NAMES.items()},
}
_BEGINNINGS = NAMES | _OTHERS


def speculators(source: HeadSource) -> HeadLayout:
    fields = source.fields
    kind = fields.choice("speculators_model_type", ("dflash", "dspark"), "dflash")
    inner = source.open_wrapper(kind)
    names = source.names(_BEGINNINGS)
    decoder = read_decoder(inner, names)
    layers = _told_or(source, fields, "aux_hidden_state_layer_ids", outputs=False)
    causal = decoder.window > 0 and not fields.flag("sliding_window_non_causal", False)
    anchored = fields.flag("sample_from_anchor", kind == "dspark")
    head = _Parts(source, [fields], names, inner).head(decoder, layers, anchored=anchored, causal=causal)
    return source.laid_out(head, kind, "speculators", names, source.vocabulary(inner))


def deepspec(source: HeadSource) -> HeadLayout:
    """Its DFlash is a DSpark without a Markov head, and anchored too."""
    fields, names = source.fields, source.names(_BEGINNINGS)
    layers = _told_or(source, fields, "target_layer_ids", outputs=True)
    decoder = read_decoder(fields, names)
    head = _Parts(source, [fields], names, fields).head(decoder, layers, anchored=True, causal=False)
    return source.laid_out(head, "dspark", "deepspec", names, source.vocabulary(fields))


def zlab(source: HeadSource) -> HeadLayout:
    fields, names = source.fields, source.names(_BEGINNINGS)
    inner, further = fields.within("dflash_config"), fields.within("dspark_config")
    kind = inner.choice("projector_type", ("dflash", "dspark"), "dspark" if "markov.w1.weight" in names else "dflash")
    for holder in (fields, inner):
        holder.only("attention_sink_bias", False, "attention sinks are not supported")
        holder.only("input_embedding_scale", 1.0, "embeddings are taken as they are")
        holder.only("output_multiplier", 1.0, "logits are taken as they are")
        holder.only("final_logit_softcapping", None, "logits are taken as they are")
    inner.choice("attention_mode", ("gqa", "mha"), "gqa")
    size = inner.count("swa_window_size", 0, least=0)
    own = inner.count("swa_window_size") if inner.flag("use_swa", size > 0) else 0
    window = max(own, read_window(fields, read_depth(fields)))
    decoder = read_decoder(fields, names, window=window)
    parts = _Parts(source, [fields, inner, further], names, fields)
    holder = inner if inner.has("target_layer_ids") else fields
    layers = _told_or(source, holder, "target_layer_ids", outputs=True) or _default_ids(source, decoder.layers)
    causal = fields.flag("is_causal", inner.flag("causal", decoder.window > 0))  # vLLM's rule
    anchored = inner.flag("shift_label", kind == "dspark")
    head = parts.head(decoder, layers, anchored=anchored, causal=causal)
    return source.laid_out(head, kind, "z-lab", names, source.vocabulary(fields))


def _told_or(source: HeadSource, fields: HeadFields, name: str, *, outputs: bool) -> tuple[int, ...]:
    """`outputs`: as in transformers, whose last output is normed."""
    if fields.has(name):
        return source.hidden_ids(fields, name, outputs=outputs, normed=outputs)
    return source.layers or ()


def _default_ids(source: HeadSource, depth: int) -> tuple[int, ...]:
    """z-lab's: spread evenly over the outputs of layers 1 to n - 3, one for each layer of the head."""
    count = source.target.layers
    if depth == 1:
        return (count // 2 + 1,)
    ids = tuple(round(1 + i * (count - 4) / (depth - 1)) + 1 for i in range(depth))
    if len(set(ids)) < depth or min(ids) < 0:
        raise source.refused(f"names no layers, and its target has {count}: too few for its {depth} layers' default")
    return ids


class _Parts:
    """Publishers put the same fields into different objects, `holders`."""

    def __init__(
        self, source: HeadSource, holders: list[HeadFields], names: dict[str, str], decoder_fields: HeadFields
    ) -> None:
        self._source, self._holders, self._names = source, holders, names
        self._hidden = decoder_fields.count("hidden_size")

    def said(self, name: str, default: object) -> object:
        found = [holder for holder in self._holders if holder.has(name)]
        values = [holder.take(name) for holder in found]
        if any(value != values[0] for value in values[1:]):
            raise found[1].refused(name, f"{values[0]!r}, as outside of this object")
        return values[0] if values else default

    def count(self, name: str, least: int, default: int | None = None) -> int:
        self.said(name, default)
        return next((h for h in self._holders if h.has(name)), self._holders[0]).count(name, default, least)

    def head(self, decoder: Decoder, layers: tuple[int, ...], *, anchored: bool, causal: bool) -> BlockHead:
        source = self._source
        source.check_target(source.fields.count("target_hidden_size", source.target.hidden), source.fields)
        if not layers:
            raise source.refused("names no layers of its target")
        rank = self.count("markov_rank", 0, self._shape("markov.w1.weight")[-1])
        projection = Projection(layers, decoder.hidden, feature_norm=True, eps=decoder.eps)
        mask = self.count("mask_token_id", 0)
        if mask >= source.target.vocab:
            raise source.refused(f"has a mask_token_id of {mask}; its target's vocabulary is {source.target.vocab}")
        return BlockHead(
            projection,
            decoder,
            block=self.count("block_size", 2),
            mask_token=mask,
            anchored=anchored,
            causal=causal,
            markov_rank=rank,
            markov=self._markov(),
            confidence=self._confidence(rank),
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names.get(name, "")) or (0,)

    def _markov(self) -> Literal["plain", "gated"]:
        kind = self.said("markov_head_type", "gated" if "markov.gate.weight" in self._names else "vanilla")
        if kind not in ("vanilla", "gated"):
            holder = next(h for h in self._holders if h.has("markov_head_type"))
            raise holder.refused("markov_head_type", "vanilla or gated")
        return "gated" if kind == "gated" else "plain"

    def _confidence(self, rank: int) -> Literal["", "hidden", "markov"]:
        seen = self._shape("confidence.weight")[-1]
        for name in ("enable_confidence_head", "use_confidence_head"):
            if self.said(name, bool(seen)) != bool(seen):
                told = "a tensor" if seen else "no tensor"
                raise self._source.refused(f"has {told} of a confidence head, and says otherwise: {name}")
        if not seen:
            self.said("confidence_head_with_markov", None)
            return ""
        wide = self.said("confidence_head_with_markov", seen != self._hidden and rank > 0)
        return "markov" if wide else "hidden"
