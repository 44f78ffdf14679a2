"""EAGLE-1 and EAGLE-2, whose weights are of one kind, in SafeAILab's layout; HASS adds norms before the product."""

from __future__ import annotations

from pilotfish.model.heads.families.layout import (
    HeadLayout,
    HeadSource,
    Renaming,
    check_target,
    read_decoder,
    read_vocabulary,
)
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.spec import FINAL, HeadSpec, Projection

_NAMES = Renaming(
    {"fc.": "input_proj.", "embedding_layernorm.": "embed_norm.", "hidden_states_layernorm.": "hidden_norm."}
)
#: Most have none of these.
_NORMS = ("layers.0.input_layernorm.weight", "norm.weight", "embed_norm.weight", "hidden_norm.weight")


def safeailab(source: HeadSource) -> HeadLayout:
    fields, names = source.fields, _NAMES.of(source)
    biased = "input_proj.bias" in names
    if fields.flag("bias", biased) != biased:
        raise fields.refused("bias", f"{biased}, as there {'is' if biased else 'is no'} tensor fc.bias")
    decoder = read_decoder(fields, names)
    check_target(source, decoder.hidden)
    if ("embed_norm.weight" in names) != ("hidden_norm.weight" in names):
        raise source.refused("has one of the tensors embedding_layernorm and hidden_states_layernorm; both are needed")
    projection = Projection((FINAL,), decoder.hidden, fc=False, eps=decoder.eps)
    target = source.target
    head = RecurrentHead(projection, decoder, "joined")
    spec = HeadSpec(head, "eagle1", "safeailab", target.hidden, target.layers, read_vocabulary(source, fields))
    return HeadLayout(spec, names, absent=frozenset(name for name in _NORMS if name not in names))
