"""A head's own rotary embedding, as transformers' `rope_parameters`, all of whose numbers are checked."""

from __future__ import annotations

from typing import Any

from pilotfish.model.heads.fields import HeadFields

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
