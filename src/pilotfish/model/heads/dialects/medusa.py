"""Medusa as its authors lay it out, and as vLLM does. The weights say how many heads there are: published
configurations are wrong on it."""

from __future__ import annotations

import re

from pilotfish.model.heads.dialects.layout import HeadLayout, HeadSource, check_target
from pilotfish.model.heads.spec import FINAL, HeadSpec, ParallelHead, Projection


def original(source: HeadSource) -> HeadLayout:
    """`{i}.{j}.linear`, then `{i}.{blocks}`."""
    fields = source.fields
    for name in ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "version"):
        fields.take(name)
    blocks = _count(source, r"0\.(\d+)\.linear\.weight")
    names: dict[str, str] = {}
    for name in source.headers:
        ours = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"heads.\1.blocks.\2.", name)
        ours = re.sub(rf"^(\d+)\.{blocks}\.", r"heads.\1.lm_head.", ours)
        names[ours] = name
    return _layout(source, names, blocks, "medusa")


def vllm(source: HeadSource) -> HeadLayout:
    """`blocks.{i}.layers.{j}`, `lm_heads.{i}` or one `lm_head` for all, and maybe `token_map`."""
    fields = source.fields
    fields.take("num_heads")
    blocks = _count(source, r"blocks\.0\.layers\.(\d+)\.weight")
    fields.only("num_hidden_layers", blocks, "as many blocks as the tensors have")
    fields.only("medusa_fc_bias", "blocks.0.layers.0.bias" in source.headers, "as the tensors have it")
    shared = fields.flag("original_lm_head", False)
    names: dict[str, str] = {}
    for name in source.headers:
        ours = re.sub(r"^blocks\.(\d+)\.layers\.", r"heads.\1.blocks.", name)
        names[re.sub(r"^lm_heads\.(\d+)\.", r"heads.\1.lm_head.", ours)] = name
    if shared and "lm_head.weight" in names:
        one = names.pop("lm_head.weight")
        names |= {f"heads.{i}.lm_head.weight": one for i in range(_count(source, r"blocks\.(\d+)\.layers\.0\.weight"))}
    return _layout(source, names, blocks, "vllm")


def _layout(source: HeadSource, names: dict[str, str], blocks: int, dialect: str) -> HeadLayout:
    fields, target = source.fields, source.target
    hidden = fields.count("hidden_size", target.hidden)
    check_target(source, hidden)
    if (vocab := fields.count("vocab_size", target.vocab)) != target.vocab:
        raise source.refused(f"is of a vocabulary of {vocab}; its target {target.directory} has {target.vocab}")
    rows = (source.shape(names.get("heads.0.lm_head.weight", "")) or (target.vocab,))[0]
    fields.only("truncated_vocab_size", rows, "the rows of its lm_heads")
    heads = 1 + max(int(found[1]) for found in (re.match(r"heads\.(\d+)\.", name) for name in names) if found)
    bias = "heads.0.blocks.0.bias" in names
    head = ParallelHead(Projection((FINAL,), hidden, fc=False), hidden, heads, blocks, bias)
    spec = HeadSpec(head, "medusa", dialect, target.hidden, target.layers, rows)
    return HeadLayout(spec, names)


def _count(source: HeadSource, pattern: str) -> int:
    """One more than the highest number in names that fit."""
    found = [re.fullmatch(pattern, name) for name in source.headers]
    return 1 + max((int(match[1]) for match in found if match), default=-1)
