"""A row below gets the normed state. The embedding comes first, except in MiMo."""

import re
from dataclasses import replace

from pilotfish.model.heads.families.layout import HeadLayout, HeadSource, read_decoder
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.spec import FINAL, Projection

#: Models whose norms multiply by one more than their weights.
_OFFSET_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_text")
#: Of a whole model: parts that a head may share, and parts that are none of its business.
_OUTER = {"model.embed_tokens.": "embed_tokens.", "lm_head.": "lm_head.", "model.": "", "visual.": ""}
SPECULATORS = {
    "mtp_layers.0.input_proj.": "input_proj.",
    "mtp_layers.0.hidden_layernorm.": "hidden_norm.",
    "mtp_layers.0.token_layernorm.": "embed_norm.",
    "mtp_layers.0.final_layernorm.": "norm.",
    "mtp_layers.0.": "layers.0.",
}
_MIMO = {f"model.{name}": ours for name, ours in SPECULATORS.items()}
_QWEN = {
    "mtp.fc.": "input_proj.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.",
    "mtp.pre_fc_norm_embedding.": "embed_norm.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "layers.0.",
}


def speculators(source: HeadSource) -> HeadLayout:
    inner = source.open_wrapper("mtp")
    source.fields.only("num_nextn_predict_layers", 1, "one module")
    inner.values()  # a whole model's: the layer's own facts are among them
    kind = inner.take("model_type", "qwen2")
    return _layout(source, inner, SPECULATORS, "speculators", offset=kind in _OFFSET_NORMS)


def qwen(source: HeadSource) -> HeadLayout:
    fields = _inner(source.fields)
    offset = fields.take("model_type") in _OFFSET_NORMS
    return _layout(source, fields, _QWEN | _OUTER, "qwen", offset=offset)


def mimo(source: HeadSource) -> HeadLayout:
    fields = _inner(source.fields)
    fields.only("num_nextn_predict_layers", 1, "one module")
    return _layout(source, fields, _MIMO | _OUTER, "mimo", zero_first=True, hidden_first=True)


def deepseek(source: HeadSource) -> HeadLayout:
    fields = _inner(source.fields)
    fields.only("num_nextn_predict_layers", 1, "one module")
    found = {name.removesuffix("eh_proj.weight") for name in source.headers if name.endswith("eh_proj.weight")}
    if len(found) > 1:
        raise source.refused(f"has {len(found)} MTP modules ({', '.join(sorted(found))}); one is supported")
    (prefix,) = found
    inner = {
        f"{prefix}eh_proj.": "input_proj.",
        f"{prefix}hnorm.": "hidden_norm.",
        f"{prefix}enorm.": "embed_norm.",
        f"{prefix}shared_head.norm.": "norm.",
        f"{prefix}shared_head.head.": "lm_head.",
        f"{prefix}embed_tokens.": "embed_tokens.",
        prefix: "layers.0.",
    }
    outer = dict(_OUTER)
    if f"{prefix}embed_tokens.weight" in source.headers:  # the module repeats what the model has
        outer["model.embed_tokens."] = ""
    if f"{prefix}shared_head.head.weight" in source.headers:
        outer["lm_head."] = ""
    return _layout(source, fields, inner | outer, "deepseek", zero_first=True)


def _inner(fields: HeadFields) -> HeadFields:
    return fields.within("text_config") if fields.has("text_config") else fields


def _layout(
    source: HeadSource,
    fields: HeadFields,
    beginnings: dict[str, str],
    dialect: str,
    *,
    offset: bool = False,
    zero_first: bool = False,
    hidden_first: bool = False,
) -> HeadLayout:
    names = source.names(beginnings)
    for ours, name in names.items():
        if re.search(r"\.(experts|shared_experts?|gate)\.|kv_a_proj|linear_attn", ours):
            raise source.refused(f"has tensor {name}: experts and latent attention are not supported in heads")
    fields.only("rope_interleave", False, "halves of a head are rotated together")
    source.check_target(fields.count("hidden_size"))
    decoder = read_decoder(fields, names, layers=1, window=0, norm_offset=float(offset))
    rows = source.shape(names.get("layers.0.self_attn.q_proj.weight", ""))[:1]
    decoder = replace(decoder, gated_attention=rows == (2 * decoder.heads * decoder.head_dim,))
    projection = Projection((FINAL,), decoder.hidden, fc=False, eps=decoder.eps)
    head = RecurrentHead(
        projection, decoder, "joined", hidden_first=hidden_first, recycles_normed=True, zero_first_embedding=zero_first
    )
    return source.laid_out(head, "mtp", dialect, names, source.vocabulary(fields), of_target=True)
