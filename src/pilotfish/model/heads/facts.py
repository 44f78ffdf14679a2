"""What a head is, for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.spec import FINAL, POSITIONS
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.heads.weights import tensor_files


@dataclass(frozen=True)
class HeadFacts:
    directory: str
    trained_on: str  # what it says, and whether that is so of the target
    kind: str
    dialect: str
    guesses: str  # how
    hidden_states: str  # of the target, that it takes
    other_hidden_states: str  # those of the other reading of its configuration; "" where there is one
    feature_width: int
    context: int  # positions up to which it guesses; 0: any
    vocab_size: int  # tokens that it can guess
    parameters: int
    files: int
    file_bytes: int
    digest: str


def head_facts(directory: Path, target: TargetFacts, layers: tuple[int, ...] | None = None) -> HeadFacts:
    """InputError if the head cannot be used with its target. Reads all of it."""
    files, paths = read_head(directory, target, layers), tensor_files(directory)
    spec = files.spec
    return HeadFacts(
        directory=str(directory),
        trained_on=files.trained_on.told(target),
        kind=spec.kind,
        dialect=spec.dialect,
        guesses=spec.head.guesses,
        hidden_states=_states(spec.projection.layers, spec.target_layers),
        other_hidden_states=_states(spec.other_layers, spec.target_layers),
        feature_width=spec.projection.width,
        context=spec.head.context if spec.head.context < POSITIONS else 0,
        vocab_size=spec.draft_vocab,
        parameters=sum(tensor.numel() for tensor in files.tensors.values()),
        files=len(paths),
        file_bytes=sum(path.stat().st_size for path in paths),
        digest=files.digest,
    )


def _states(layers: tuple[int, ...], count: int) -> str:
    named = {FINAL: "final", 0: "embeddings"}
    return ", ".join(named.get(layer, str(layer)) for layer in layers) + (f" of {count}" if layers else "")
