"""Heads written in speculators' layout are read back as they were, and that library itself loads them."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import change_tensors, write_block, write_eagle3, write_mtp, write_target
from safetensors.torch import load_file

from pilotfish.model.heads.export import export_head
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.spec import Head, HeadFiles
from pilotfish.model.heads.target import TargetFacts

#: Heads of the kinds that are trained here, by a name: the function that writes them and its arguments.
WRITTEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle3": (write_eagle3, {"draft_vocab": 100}),
    "eagle3, full vocabulary": (write_eagle3, {"dialect": "safeailab", "rope_theta": 5e5}),
    "eagle3.1": (write_eagle3, {"fc_norm": True, "norm_output": True, "draft_vocab": 100}),
    "eagle3, normed before fc": (write_eagle3, {"dialect": "modelopt", "norm_before_fc": True}),
    "dspark": (write_block, {"kind": "dspark", "draft_vocab": 100}),
    "dspark, full vocabulary": (write_block, {"kind": "dspark", "confidence": "", "rank": 8}),
    "mtp": (write_mtp, {}),
}


def written(name: str, directory: Path, target: TargetFacts) -> HeadFiles:
    """With the digest of its target, as those that were trained here have it."""
    write, options = WRITTEN[name]
    files = read_head(write(directory, target=target, **options), target)
    return dataclasses.replace(files, trained_on=dataclasses.replace(files.trained_on, digest=target.digest()))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_head_is_read_back_as_it_was(name: str, target: TargetFacts, tmp_path: Path) -> None:
    before = written(name, tmp_path / "before", target)
    export_head(before, tmp_path / "after", target)
    after = read_head(tmp_path / "after", target)
    assert after.spec == dataclasses.replace(before.spec, dialect="speculators", other_layers=())
    assert after.digest == before.digest and after.trained_on.digest == before.trained_on.digest != ""
    assert (after.d2t is None) == (before.d2t is None)
    assert before.d2t is None or (after.d2t is not None and torch.equal(before.d2t, after.d2t))
    assert after.tensors.keys() == before.tensors.keys()
    for key, tensor in before.tensors.items():
        assert after.tensors[key].dtype == tensor.dtype
        assert torch.equal(after.tensors[key], tensor), key


def test_of_eagle3_they_are_left_out_if_it_is_to_be_lean(target: TargetFacts, tmp_path: Path) -> None:
    files = written("eagle3, full vocabulary", tmp_path / "before", target)
    shared = {"embed_tokens.weight": target.embedding(), "lm_head.weight": target.lm_head()}
    files = dataclasses.replace(files, tensors=files.tensors | shared)
    for name, lean in (("whole", False), ("lean", True)):
        export_head(files, tmp_path / name, target, lean=lean)
        assert (shared.keys() <= load_file(tmp_path / name / "model.safetensors").keys()) == (not lean)
        read = read_head(tmp_path / name, target).tensors
        assert all(torch.equal(read[key], tensor) for key, tensor in files.tensors.items())


@pytest.mark.parametrize(("own", "theirs"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("name", ["eagle3, full vocabulary", "dspark, full vocabulary"])
def test_the_targets_own_are_left_out_in_whatever_type_they_were_stored(
    name: str, own: str, theirs: str, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target")
    change_tensors(target.directory, {"model.embed_tokens.weight": target.embedding().to(getattr(torch, theirs))})
    change_tensors(target.directory, {"lm_head.weight": target.lm_head().to(getattr(torch, theirs))})
    files = written(name, tmp_path / "before", target)
    shared = {"embed_tokens.weight": target.embedding(), "lm_head.weight": target.lm_head()}
    files = dataclasses.replace(
        files, tensors={x: t.to(getattr(torch, own)) for x, t in (files.tensors | shared).items()}
    )
    export_head(files, tmp_path / "lean", target, lean=name.startswith("eagle3"))  # others always leave them out
    assert not shared.keys() & load_file(tmp_path / "lean" / "model.safetensors").keys()
    read = read_head(tmp_path / "lean", target).tensors
    assert all(torch.equal(read[key].to(tensor.dtype), tensor) for key, tensor in files.tensors.items())


def test_what_only_looks_like_the_targets_own_stays(target: TargetFacts, tmp_path: Path) -> None:
    files = written("eagle3, full vocabulary", tmp_path / "before", target)
    near = {"embed_tokens.weight": target.embedding().bfloat16().float(), "lm_head.weight": target.lm_head() * 1.01}
    files = dataclasses.replace(files, tensors=files.tensors | near)
    export_head(files, tmp_path / "lean", target, lean=True)
    assert near.keys() <= load_file(tmp_path / "lean" / "model.safetensors").keys()


#: Of no extra: it allows transformers up to 5.19 alone, and wants torchvision, torchaudio and datasets. It works
#: beside our transformers all the same, installed without dependencies, then hs-connectors, loguru, pydantic-settings,
#: python-dotenv, datasets, pyarrow, pandas, dill, multiprocess, xxhash, fsspec and aiohttp (`pip install --no-deps`).
NEEDED = pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="needs the package speculators")


@NEEDED
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITTEN)
def test_the_library_itself_loads_what_was_written(name: str, target: TargetFacts, tmp_path: Path) -> None:
    """Its own loader, which fills what a file lacks from the target: with names and values of its own module."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    files = written(name, tmp_path / "before", target)
    trained_on = dataclasses.replace(files.trained_on, name=str(target.directory))
    export_head(dataclasses.replace(files, trained_on=trained_on), tmp_path / "after", target)
    config = SpeculatorModelConfig.from_pretrained(tmp_path / "after")
    assert config.speculators_model_type == files.spec.kind
    model = SpeculatorModel.from_pretrained(str(tmp_path / "after"), config=config)
    theirs, ours = model.state_dict(), load_file(tmp_path / "after" / "model.safetensors")
    unexpected = sorted(ours.keys() - theirs.keys())
    missing = sorted(
        key for key in theirs.keys() - ours.keys() if key not in Head.shared and not key.startswith("verifier_")
    )
    assert (unexpected, missing) == ([], [])
    if files.spec.kind != "eagle3":  # of others it takes the target's, whatever the file has
        shared = {"embed_tokens.weight": target.embedding()}
        ours |= shared if files.d2t is not None else {**shared, "lm_head.weight": target.lm_head()}
    for key, tensor in ours.items():
        assert torch.equal(theirs[key], tensor.to(theirs[key].dtype)), key
