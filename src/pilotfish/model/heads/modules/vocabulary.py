"""A head's own vocabulary: which of the target's tokens its logits are for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pilotfish.model.heads.dialects.layout import HeadLayout, HeadSource

#: Tensors that are no weights: differences draft id -> target's id, the target's tokens that are listed, and ids.
MAPPINGS = ("d2t", "t2d", "token_map")


def target_ids(source: HeadSource, layout: HeadLayout, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """int64 [draft vocab], ascending or not; None where both vocabularies are the same."""
    count, vocab = layout.spec.draft_vocab, source.target.vocab
    if "token_map" in tensors:
        ids = _mapping(source, layout, tensors, "token_map", count)
    elif "d2t" in tensors:
        ids = _mapping(source, layout, tensors, "d2t", count) + torch.arange(count)
    elif count == vocab:
        return None
    else:
        raise source.refused(f"lacks tensor d2t: its vocabulary is {count} of the target's {vocab} tokens")
    if len(set(ids.tolist())) != count or ids.min() < 0 or ids.max() >= vocab:
        raise source.refused(f"has a vocabulary (d2t) that is not {count} different tokens below {vocab}")
    _check_listed(source, tensors, ids)
    return None if count == vocab and torch.equal(ids, torch.arange(count)) else ids


def _mapping(source: HeadSource, layout: HeadLayout, tensors: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    tensor = tensors[name]
    if tensor.shape != (count,) or tensor.dtype not in (torch.int64, torch.int32):
        told = f"{str(tensor.dtype)[6:]} of shape {list(tensor.shape)}"
        raise source.refused(f"has tensor {layout.names[name]} of {told}; int64 of shape {[count]} is needed")
    return tensor.long()


def _check_listed(source: HeadSource, tensors: Mapping[str, Tensor], ids: Tensor) -> None:
    """t2d says the same again."""
    if "t2d" not in tensors:
        return
    listed = torch.zeros(source.target.vocab, dtype=torch.bool)
    listed[ids] = True
    if tensors["t2d"].shape != listed.shape or not torch.equal(tensors["t2d"].bool(), listed):
        raise source.refused("has tensors d2t and t2d that contradict each other")
