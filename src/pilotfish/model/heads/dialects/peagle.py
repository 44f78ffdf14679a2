"""P-EAGLE in speculators' layout, and in the flat one that vLLM reads beside it: EAGLE-3's tensors and `mask_hidden`.

Both count layers by what they get. `norm_output` says nothing here: no state goes back into a head.
"""

from __future__ import annotations

from pilotfish.model.heads.dialects.eagle3 import MakeHead, input_ids, wide_layout
from pilotfish.model.heads.dialects.layout import HeadLayout, HeadSource, Renaming, open_wrapper
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.spec import FINAL, Decoder, MaskedHead, Projection

_FIRST = {"midlayer.hidden_norm.": "hidden_norm.", "midlayer.": "layers.0.", "layers.0.hidden_norm.": "hidden_norm."}
_NAMES = Renaming(_FIRST)
#: What the flat layout calls the mask's token: trainers the first, vLLM the others.
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
#: Tokens of a forward where nobody says: those that trainers take.
_DEPTH = 8
#: Tokens of a forward, at most.
_DEEPEST = 256


def is_peagle(source: HeadSource) -> bool:
    """By the tensor that only such heads have, or by what is said of them."""
    fields = source.fields
    told = fields.take("speculators_model_type") == "peagle" or any(fields.has(name) for name in _MASKS[1:])
    return told or "mask_hidden" in source.headers


def speculators(source: HeadSource) -> HeadLayout:
    inner = open_wrapper(source, "peagle")
    head = _masked(source, _MASKS[:1], _proposed(source))
    return wide_layout(source, inner, _NAMES.of(source), "speculators", input_ids(source), head, kind="peagle")


def vllm(source: HeadSource) -> HeadLayout:
    fields = source.fields
    fields.only("parallel_drafting", True, "there is a mask, which heads that guess one token at a time have not")
    several = fields.within("eagle_config").flag("use_aux_hidden_state", True)
    head = _masked(source, _MASKS, fields.count("num_depths", _DEPTH, least=2, most=_DEEPEST))
    layers = input_ids(source) if several else (FINAL,)
    return wide_layout(source, fields, _NAMES.of(source), "vllm", layers, head, kind="peagle")


def _masked(source: HeadSource, masks: tuple[str, ...], depth: int) -> MakeHead:
    fields = source.fields
    fields.flag("norm_output", False)
    residual, mask = fields.flag("norm_before_residual", False), _mask_token(source, masks)

    def made(projection: Projection, decoder: Decoder) -> MaskedHead:
        if 0 < decoder.window < depth:
            raise source.refused(f"has a window of {decoder.window}, less than the {depth} tokens of a forward")
        return MaskedHead(projection, decoder, "wide", residual_normed=residual, depth=depth, mask_token=mask)

    return made


def _mask_token(source: HeadSource, names: tuple[str, ...]) -> int:
    """The one that all fields which are there say."""
    fields, vocab = source.fields, source.target.vocab
    said = {name: fields.count(name, least=0, most=vocab - 1) for name in names if fields.has(name)}
    if not said:
        raise source.refused(f"names no token of its mask: {' or '.join(names)} in its config.json")
    first, *others = said
    for name in others:
        if said[name] != said[first]:
            raise fields.refused(name, f"{said[first]}, as {first} says")
    return said[first]


def _proposed(source: HeadSource) -> int:
    """As many tokens as it was trained to guess, which are said of its first proposal."""
    outer = source.fields.within("speculators_config")
    methods = outer.take("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        raise outer.refused("proposal_methods", "a list of objects, at least one")
    first = HeadFields(methods[0], source.fields.path, "speculators_config.proposal_methods[0].")
    return first.count("speculative_tokens", least=2, most=_DEEPEST)
