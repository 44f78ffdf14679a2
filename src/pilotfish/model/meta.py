"""Modules without memory, for whoever wants to know their shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights


def meta_module(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The module of a configuration, its parameters on the device `meta`."""
    with torch.device("meta"), no_init_weights(), without_decompositions():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    module.tie_weights()  # part of the initialization that is left out
    return module


@contextmanager
def without_decompositions() -> Iterator[None]:
    """While transformers builds modules on the device `meta`: the two operations there that torch decomposes in Python,
    for which it imports its compiler and sympy, over a second of work. `torch.arange` without a device makes its small
    tensor on the CPU, and no random numbers are drawn for tensors without memory."""
    arange, normal = torch.arange, torch.nn.init.normal_

    def on_cpu(*arguments: Any, **options: Any) -> torch.Tensor:
        return arange(*arguments, **{"device": "cpu", **options})

    def drawn(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return tensor if tensor.is_meta else normal(tensor, *arguments, **options)

    torch.arange, torch.nn.init.normal_ = on_cpu, drawn
    try:
        yield
    finally:
        torch.arange, torch.nn.init.normal_ = arange, normal
