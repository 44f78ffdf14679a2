"""Pilotfish: asynchronous, disaggregated, lossless speculative decoding."""

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.llm import LLM, Completion, RequestOutput

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]
