import os
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pilotfish.errors import ParameterError
from pilotfish.options import count, option, separated

Mode = Literal["off", "sync", "async"]
BudgetKind = Literal["auto", "fixed"]
DrafterKind = Literal["lm", "ngram", "suffix"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "fp8"]
#: Number formats of a GGUF file.
GGUFWeights = Literal["bf16", "f16", "f32"]
#: The engine that runs a draft.
Backend = Literal["pilotfish", "llama.cpp", "openvino"]
KVDType = Literal["auto", "int8", "fp8"]
Texts = tuple[str, ...]
TOKENS: Any = {"parse": count, "metavar": "TOKENS"}  # as in 8192, 8k or 8K
ADDRESSES: Any = {"parse": separated(",")}
KEYS: Any = {"parse": separated(None)}
#: The group, in the help of commands, of bounds that engines and servers have.
limit = partial(option, panel="How much at a time")


def drafter_kinds(drafter: str) -> tuple[DrafterKind, ...]:
    """Drafters of `lm`, `lm+ngram`, …, in DrafterKind's order. ParameterError for other texts."""
    names = drafter.split("+") if isinstance(drafter, str) else []
    kinds: tuple[DrafterKind, ...] = get_args(DrafterKind)
    chosen = tuple(kind for kind in kinds if kind in names)
    if not chosen or len(chosen) != len(names):
        raise ParameterError("drafter", drafter, f"{', '.join(kinds)}, or several joined by +, each once")
    return chosen


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_cores(text: str, field: str = "cores") -> frozenset[int]:
    """Core numbers of "0,2-3". ParameterError, naming `field`, for another text or a core that is not allowed."""
    if text == "":
        return frozenset()
    may_use = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    chosen: set[int] = set()
    for part in str(text).split(","):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.isdecimal() and len(end) < 6 for end in ends):
            raise ParameterError(field, text, "core numbers and ranges, as in 0,2-3")
        chosen |= set(range(int(ends[0]), int(ends[-1]) + 1))
    if not chosen or not chosen <= may_use:
        raise ParameterError(field, text, f"cores of {', '.join(map(str, sorted(may_use)))}")
    return frozenset(chosen)


def layer_ids(field: str, text: str) -> tuple[int, ...]:
    """The numbers of "2,16,29". ParameterError, naming `field`, for another text."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise ParameterError(field, text, "numbers of hidden states joined by a comma, as in 2,16,29") from error


def least_sent(text: str) -> int | None:
    """Least tokens of a prompt for a prefill worker; None: auto. ParameterError for another text."""
    if text == "auto":
        return None
    try:
        return count("prefill_threshold", text)
    except ParameterError as error:
        allowed = "auto, or a number of tokens, as in 2048 or 2K"
        raise ParameterError("prefill_threshold", text, allowed) from error


def model_name(directory: Path) -> str:
    """For messages and metrics: the parent directory's name and the directory's; of a GGUF file its own."""
    return "/".join(directory.resolve().parts[-2:]).removeprefix("gguf/")
