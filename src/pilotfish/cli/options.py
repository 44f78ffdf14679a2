"""Options that several commands take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.errors import InputError, ParameterError

DEFAULT_PAIR = "pycode"

DTypeOption = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
QuantizationOption = Annotated[str, typer.Option("--quantization", help="Weights: none, int8, or fp8 on CUDA.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, or cuda where there is one.")]
ThreadsOption = Annotated[int, typer.Option("--threads", help="CPU threads; 0: all cores of this process.")]
EagerOption = Annotated[bool, typer.Option("--eager", help="The reference: plain torch operations, no C++ kernels.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="New tokens at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")]


@dataclass(frozen=True)
class Models:
    """Where the models are."""

    target: Path
    draft: Path | None


def resolve_models(pair: str | None, target: Path | None, draft: Path | None) -> Models:
    """The directories that --pair, or --target and --draft, name; the bundled pair when nothing is given."""
    if target is not None:
        if pair is not None:
            raise InputError("pair: it cannot be combined with --target; give one of them")
        return Models(_directory("target", target), draft and _directory("draft", draft))
    if draft is not None:
        raise InputError("draft: it needs --target; a pair brings its own draft")
    from pilotfish.pairs import resolve_pair

    dirs = resolve_pair(pair or DEFAULT_PAIR)
    return Models(dirs.target, dirs.draft)


def _directory(field: str, path: Path) -> Path:
    if not path.is_dir():
        raise ParameterError(field, str(path), "a model directory in Hugging Face format")
    return path
