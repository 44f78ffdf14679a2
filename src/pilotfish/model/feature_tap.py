"""Features: hidden states of some layers, taken where a row's residual stream is complete, projected for a head, and
kept in the row's slot beside its KV.

layer    0        1              n - 1           norm       head
        ^        ^              ^       ^             ^
id      0        1              n - 1   n             FINAL
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotfish.core.features.features import FINAL
from pilotfish.errors import ModelError


@dataclass(frozen=True)
class FeatureTap:
    layers: tuple[int, ...]  # ids as above, in the order in which states are concatenated
    width: int  # of a feature
    #: States [rows, len(layers) * hidden], in the model's dtype -> [rows, width]. A row's bits depend on the row alone.
    project: Callable[[Tensor], Tensor]
    digest: str  # of all that features depend on beside the target


def refuse_unknown_layers(layers: Sequence[int], count: int) -> None:
    """ModelError for an id that a target of `count` layers lacks."""
    for layer in layers:
        if layer != FINAL and not 0 <= layer <= count:
            allowed = f"0 to {count}, or {FINAL}, the state after the final norm"
            raise ModelError(f"features: layer {layer} is none of the target's; expected {allowed}")


class CapturingDecoder(torch.nn.Module):
    """A plain decoder that is one module, and keeps the states of some layers itself."""

    def __init__(self, model: Any, context: int) -> None:
        """Of transformers' `model`, whose layers' parts are replaced."""
        super().__init__()
        inner, self.lm_head = model.model, model.lm_head
        self.embed_tokens, self.layers, self.norm = inner.embed_tokens, inner.layers, inner.norm
        weight = inner.embed_tokens.weight
        cos, sin = inner.rotary_emb(weight, torch.arange(context, device=weight.device)[None])
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()  # [context, rotated part of a head]
        self._captured: tuple[list[int], Tensor | None] = ([], None)  # layers, and where their states go

    @contextmanager
    def capturing(self, layers: Sequence[int], states: Tensor) -> Iterator[None]:
        self._captured = ([*layers], states)
        try:
            yield
        finally:
            self._captured = ([], None)


def capturing(model: Any, layers: Sequence[int], states: Tensor) -> AbstractContextManager[None]:
    """A forward meanwhile writes the states of all its rows into `states` [rows, len(layers) * hidden]."""
    return model.capturing(layers, states) if isinstance(model, CapturingDecoder) else _hooked(model, layers, states)


@contextmanager
def _hooked(model: Any, layers: Sequence[int], states: Tensor) -> Iterator[None]:
    inner, hidden = model.model, model.config.hidden_size
    with ExitStack() as stack:
        for layer, part in zip(layers, torch.split(states, hidden, dim=1), strict=True):
            if layer == FINAL:
                hook = inner.norm.register_forward_hook(partial(_keep_output, part))
            else:
                module = inner.norm if layer == len(inner.layers) else inner.layers[layer]
                hook = module.register_forward_pre_hook(partial(_keep_input, part), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _keep_input(part: Tensor, _module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    part.copy_(args[0][0] if args else kwargs["hidden_states"][0])


def _keep_output(part: Tensor, _module: Any, _args: tuple[Tensor, ...], output: Tensor) -> None:
    part.copy_(output[0])
