"""Which target a head was trained on: what it says of that, and what the log makes of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import change_config, write_eagle3, write_head, write_medusa, write_mtp, write_target
from safetensors.torch import load_file

from pilotfish.engine.heads import ConfiguredHead, note_head
from pilotfish.errors import ModelError
from pilotfish.model.heads.export import export_head
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.target import DIGEST, SAMPLED, TargetFacts, TrainedOn


@pytest.fixture(scope="module")
def tuned(target: TargetFacts, tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return copied(target, tmp_path_factory.mktemp("tuned"), 1.5)


def copied(
    target: TargetFacts, directory: Path, scale: float = 1.0, dtype: torch.dtype = torch.float32, **fields: Any
) -> TargetFacts:
    config = json.loads((target.directory / "config.json").read_text())
    tensors = load_file(target.directory / "model.safetensors")
    write_head(directory, {**config, **fields}, {name: (scale * x).to(dtype) for name, x in tensors.items()})
    return TargetFacts.read(directory)


def test_a_digest_is_of_the_embedding_in_any_type(target: TargetFacts, tuned: TargetFacts, tmp_path: Path) -> None:
    assert len(target.digest()) == 64 and target.digest() != tuned.digest()
    assert copied(target, tmp_path / "bfloat16", dtype=torch.bfloat16).digest() == target.digest()
    torch.save(load_file(target.directory / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert dataclasses.replace(target, directory=tmp_path).digest() == target.digest()
    assert write_target(tmp_path / "small", vocab=SAMPLED // 3).digest() != ""


def test_there_is_none_without_an_embedding(target: TargetFacts, tmp_path: Path) -> None:
    write_head(tmp_path, {}, {"encoder.embed.weight": torch.zeros(3, 4)})
    assert dataclasses.replace(target, directory=tmp_path).digest() == ""


def test_what_is_said_is_doubted_where_it_is_not_so(target: TargetFacts, tuned: TargetFacts) -> None:
    digest = target.digest()
    named = TrainedOn("some/model", ("LlamaForCausalLM",))
    for trained_on in (TrainedOn(), named, TrainedOn("", ("Qwen3ForCausalLM",), digest)):
        assert trained_on.doubt(target) is None
    doubt = TrainedOn("", (), digest).doubt(tuned)
    assert doubt == f"other embeddings ({digest[:12]}) than {tuned.directory} ({tuned.digest()[:12]})"
    other = TrainedOn("some/model", ("Qwen3ForCausalLM",)).doubt(target)
    assert other == f"some/model, Qwen3ForCausalLM, not on {target.directory} (LlamaForCausalLM)"
    assert named.told(target) == "some/model, as it says" and TrainedOn("", (), digest).told(target)
    assert TrainedOn("", (), digest).told(tuned).startswith("another target: other embeddings")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({DIGEST: 7}, DIGEST),
        ({"speculators_config": []}, "speculators_config"),
        ({"speculators_config": {"verifier": {"architectures": "x"}}}, "speculators_config.verifier.architectures"),
    ],
)
def test_what_is_no_text_is_refused(fields: dict[str, Any], named: str, target: TargetFacts, tmp_path: Path) -> None:
    change_config(write_eagle3(tmp_path, target=target), **fields)
    with pytest.raises(ModelError, match=f"config.json: {named}: .* is not allowed"):
        read_head(tmp_path, target)


def test_every_layout_can_say_it(target: TargetFacts, tmp_path: Path) -> None:
    for write in (write_medusa, write_eagle3, write_mtp):
        head = write(tmp_path / write.__name__, target=target)
        change_config(head, **{DIGEST: "abc"})
        assert read_head(head, target).trained_on.digest == "abc"


def test_it_is_written_and_read_back(target: TargetFacts, tmp_path: Path) -> None:
    files = read_head(write_eagle3(tmp_path / "before", target=target), target)
    assert files.trained_on == TrainedOn("target", ("LlamaForCausalLM",))
    trained_on = dataclasses.replace(files.trained_on, digest=target.digest())
    export_head(dataclasses.replace(files, trained_on=trained_on), tmp_path / "after", target)
    assert read_head(tmp_path / "after", target).trained_on == trained_on


def test_the_log_says_what_is_doubted_and_how_far_it_guesses(
    target: TargetFacts, tuned: TargetFacts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_eagle3(tmp_path, target=target, **{DIGEST: target.digest()})
    caplog.set_level("INFO")
    for facts, context in ((target, 2048), (tuned, 8192)):
        head = ConfiguredHead(directory, facts)
        note_head(head, head.either()[0], context)
    warning, reach = caplog.messages
    assert warning.startswith(f"head: {tmp_path} was trained on other embeddings (") and "seldom be right" in warning
    assert reach.startswith(f"head: {tmp_path} guesses up to position 2048 of the target's 8192; ")
