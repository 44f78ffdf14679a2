"""Pilotfish: asynchronous, disaggregated, lossless speculative decoding."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pilotfish.openmp import wait_passively

if TYPE_CHECKING:
    from pilotfish.core.sampling.constraint import Constraint
    from pilotfish.core.sampling.sampling_params import SamplingParams
    from pilotfish.core.scheduling.executor import TokenLogprobs
    from pilotfish.engine.llm import LLM, Completion, RequestOutput
    from pilotfish.engine.pairs import resolve_pair

wait_passively()  # here, as every import of pilotfish passes here before torch is loaded

__all__ = ["LLM", "Completion", "Constraint", "RequestOutput", "SamplingParams", "TokenLogprobs", "resolve_pair"]

_MODULES = {
    "Constraint": "pilotfish.core.sampling.constraint",
    "SamplingParams": "pilotfish.core.sampling.sampling_params",
    "TokenLogprobs": "pilotfish.core.scheduling.executor",
    "resolve_pair": "pilotfish.engine.pairs",
}


def __getattr__(name: str) -> object:
    """Load public names on first use: `pilotfish --help` must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "pilotfish.engine.llm")), name)
