import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.heads.families.layout import HeadLayout, HeadSource, with_layers
from pilotfish.model.heads.families.table import find_layout
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.spec import FINAL, POSITIONS, HeadFiles, HeadSpec
from pilotfish.model.heads.target import TargetFacts, TrainedOn
from pilotfish.model.heads.weights import read_tensor_headers, read_tensors, tensor_files
from pilotfish.model.loading.metadata import read_object

_FLOATS = ("F32", "F16", "BF16")
#: Tensors that are no weights: differences draft id -> target's id, the target's tokens that are listed, and ids.
MAPPINGS = ("d2t", "t2d", "token_map")


def read_spec(directory: Path, target: TargetFacts, layers: tuple[int, ...] | None = None) -> HeadSpec:
    return _read_layout(directory, target, layers)[1].spec


def read_head(directory: Path, target: TargetFacts, layers: tuple[int, ...] | None = None) -> HeadFiles:
    """Shared tensors come from the target's files. `layers` replace the hidden states that the configuration names, in
    our numbers. ModelError for a head that cannot be used with this target."""
    source, layout = _read_layout(directory, target, layers)
    loaded = read_tensors(source.headers, layout.names.values())
    tensors = {ours: loaded[name] for ours, name in layout.names.items()}
    for ours, name in layout.names.items():
        if tensors[ours].is_floating_point() and not tensors[ours].isfinite().all():
            raise ModelError(f"head: tensor {name} in {source.headers[name].file} holds NaN or infinity")
    d2t = target_ids(source, layout, tensors)
    own = {name: tensor for name, tensor in tensors.items() if name not in MAPPINGS}
    own |= _shared(layout.spec, own, d2t, target)
    trained_on = TrainedOn.read(source.fields)
    return HeadFiles(layout.spec, own, d2t, projection_digest(layout.spec, own), trained_on)


def _read_layout(directory: Path, target: TargetFacts, layers: tuple[int, ...] | None) -> tuple[HeadSource, HeadLayout]:
    if not directory.is_dir():
        raise ModelError(f"head: {directory} is not a directory")
    path = directory / "config.json"
    fields = HeadFields(read_object(path) if path.is_file() else {}, path)
    files = tensor_files(directory)
    if not files:
        raise ModelError(f"head: {directory} has no tensors: no model.safetensors, nor any other file that is known")
    source = HeadSource(fields, read_tensor_headers(files), target, layers)
    if layers is not None:
        _check_told(layers, target)
    layout = find_layout(source)(source)
    TrainedOn.read(fields)  # so that its fields are checked, and none of them is one that nobody read
    if not layout.of_target:
        fields.refuse_unread(layout.spec.kind)
    if layers is not None:
        _check_count(layout, source, layers)
        layout = dataclasses.replace(layout, spec=with_layers(layout.spec, layers))
    _check_tensors(source, layout)
    return source, layout


def _check_told(layers: tuple[int, ...], target: TargetFacts) -> None:
    for layer in layers:
        if layer != FINAL and not 0 <= layer <= target.layers:
            allowed = f"0 to {target.layers}, or {FINAL}: after the final norm"
            raise ParameterError("draft_layers", layer, allowed)
    if len(set(layers)) < len(layers):
        raise ParameterError("draft_layers", ",".join(map(str, layers)), "each hidden state once")


def _check_count(layout: HeadLayout, source: HeadSource, layers: tuple[int, ...]) -> None:
    columns = source.shape(layout.names.get("fc.weight", ""))[-1:] or (source.target.hidden,)
    count = columns[0] // source.target.hidden
    if len(layers) != count and columns[0] % source.target.hidden == 0:
        allowed = f"{count} of them, as {source.fields.path.parent} takes"
        raise ParameterError("draft_layers", ",".join(map(str, layers)), allowed)


def _check_tensors(source: HeadSource, layout: HeadLayout) -> None:
    spec, names = layout.spec, layout.names
    shapes = spec.shapes(source.target.vocab)
    for ours, name in names.items():
        if ours in MAPPINGS:
            continue
        header = source.headers[name]
        if ours not in shapes or ours in layout.absent:
            raise source.refused(f"has tensor {name}, which has no place in a head of {spec.kind} of its config.json")
        if header.shape != shapes[ours]:
            needs = f"{list(shapes[ours])} is needed"
            raise source.refused(f"has tensor {name} of shape {list(header.shape)}; {needs}")
        if header.dtype not in _FLOATS:
            raise source.refused(f"has tensor {name} of {header.dtype}; float32, float16 or bfloat16 is needed")
    for ours in shapes:
        if ours not in names and ours not in layout.absent and ours not in spec.head.optional():
            raise source.refused(f"lacks tensor {ours}, which its config.json needs")


def _shared(spec: HeadSpec, own: Mapping[str, Tensor], d2t: Tensor | None, target: TargetFacts) -> dict[str, Tensor]:
    lacking = [name for name in spec.head.shared if name not in own]
    if lacking and (hidden := spec.shapes(target.vocab)[lacking[0]][1]) != target.hidden:
        raise ModelError(f"head: it lacks {lacking[0]}, and its width of {hidden} is not its target's, {target.hidden}")
    shared: dict[str, Tensor] = {}
    if "embed_tokens.weight" in lacking:
        shared["embed_tokens.weight"] = target.embedding()
    if "lm_head.weight" in lacking:
        rows = target.lm_head()
        shared["lm_head.weight"] = rows if d2t is None else rows[d2t].clone()
    return shared


def projection_digest(spec: HeadSpec, tensors: Mapping[str, Tensor]) -> str:
    facts = {
        **dataclasses.asdict(spec.projection),
        "hidden": spec.target_hidden,
        "layers_of_target": spec.target_layers,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in spec.projection.shapes(spec.target_hidden):
        digest.update(f"{name} {tensors[name].dtype}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- for people


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
    """InputError if the head cannot be used with the target. Reads all of it."""
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


# -- a vocabulary of its own


def target_ids(source: HeadSource, layout: HeadLayout, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """int64 [draft vocab], in any order; None if both vocabularies are the same."""
    count, vocab = layout.spec.draft_vocab, source.target.vocab
    name = next((name for name in ("token_map", "d2t") if name in tensors), None)
    if name is None:
        if count == vocab:
            return None
        raise source.refused(f"lacks tensor d2t: its vocabulary is {count} of the target's {vocab} tokens")
    ids = tensors[name]
    if ids.shape != (count,) or ids.dtype not in (torch.int64, torch.int32):
        told = f"{str(ids.dtype)[6:]} of shape {list(ids.shape)}"
        raise source.refused(f"has tensor {layout.names[name]} of {told}; int64 of shape {[count]} is needed")
    ids = ids.long() + (torch.arange(count) if name == "d2t" else 0)
    if len(set(ids.tolist())) != count or ids.min() < 0 or ids.max() >= vocab:
        raise source.refused(f"has a vocabulary (d2t) that is not {count} different tokens below {vocab}")
    listed = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), listed):
        raise source.refused("has tensors d2t and t2d that contradict each other")
    return None if count == vocab and torch.equal(ids, torch.arange(count)) else ids
