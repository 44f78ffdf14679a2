"""Targets with equal fingerprints give equal tokens; KV of equal identities stands for each other."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import edit_config, edit_tensors, make_engine, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.engine import fingerprint as identities
from pilotfish.engine.memory import load_configured
from pilotfish.engine.targets.status import identity_of
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.loading.metadata import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "first", "llama")


def of(directory: Path, **fields: Any) -> str:
    with make_engine(directory, **fields) as engine:
        facts = identities.output_facts(engine.config, engine.executor, engine.tokenizer)
        return identities.fingerprint(facts, identities.read_weights(directory).result(60.0))


def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "other"))


def test_neither_place_nor_speculation_nor_limits_change_it(model: Path, draft: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {"draft": draft, "mode": "sync", "max_requests": 3, "max_rows": 64, "kv_slots": 512}
    assert of(model) == of(copied(model, tmp_path), **own)


def test_each_byte_of_the_weights_counts(model: Path, tmp_path: Path) -> None:
    other = copied(model, tmp_path)
    edit_tensors(other, lambda tensors: list(tensors.values())[-1].view(-1)[-1:].add_(1e-3))
    assert of(model) != of(other)
    path = other / "model.safetensors"
    before = identities.read_weights(other).result(60.0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert identities.read_weights(other).result(60.0) != before


def change_end(directory: Path) -> None:
    edit_config(directory, eos_token_id=7)
    (directory / "generation_config.json").unlink(missing_ok=True)


def add_token(directory: Path) -> None:
    """One of the base vocabulary is special from now on, so texts are without it."""
    path = directory / "tokenizer.json"
    parts = json.loads(path.read_text())
    content = next(token for token, number in parts["model"]["vocab"].items() if number == 300)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    parts["added_tokens"].append({"id": 300, "content": content, "special": True, **flags})
    path.write_text(json.dumps(parts))


@pytest.mark.parametrize("change", [change_end, add_token])
def test_what_ends_outputs_and_makes_text_counts(model: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    other = copied(model, tmp_path)
    change(other)
    assert of(model) != of(other)


@pytest.mark.parametrize(
    "fields",
    [{"max_model_len": 512}, {"kv_dtype": "int8"}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"eager": True}],
    ids=str,
)
def test_how_it_computes_and_how_long_counts(model: Path, fields: dict[str, Any]) -> None:
    assert of(model) != of(model, **fields)


def test_threads_count_where_sums_are_divided_among_them(model: Path) -> None:
    assert of(model, threads=1) == of(model, threads=2)
    assert of(model, threads=1, eager=True) != of(model, threads=2, eager=True)


def test_on_a_card_its_name_and_the_kernels_sources_count(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV on a disk may be of an older build."""
    executor, found = make_engine(model).executor, list[str]()
    executor.model = replace(executor.model, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    for sources in ("a", "a", "b"):
        monkeypatch.setattr(Path, "read_text", lambda *_, sources=sources: sources)
        found.append(identities._operations(EngineConfig(target=model), executor))
    assert found[0] == found[1] != found[2] and found[0].startswith("H200 ")


def test_the_digest_of_a_tokenizer_does_not_depend_on_its_calls(model: Path) -> None:
    with make_engine(model) as engine:
        before = identity_of(engine).tokenizer
        engine.tokenizer("a b c", truncation=True, max_length=2)
        assert identity_of(engine).tokenizer == before


def test_weights_that_cannot_be_read_are_told_to_whoever_asks(tmp_path: Path) -> None:
    assert "no safetensors weights" in str(identities.read_weights(tmp_path).exception(60.0))


# -- of KV


def identity(directory: Path, tap: FeatureTap | None = None, **fields: Any) -> KVIdentity:
    config = EngineConfig(target=directory, **{"dtype": "float32", **fields})
    executor = TorchExecutor(load_configured(config, directory, config.max_model_len), num_slots=64, tap=tap)
    return identities.kv_identity(config, executor, load_tokenizer(directory))


def test_a_copy_of_a_model_has_the_same_identity(model: Path, tmp_path: Path) -> None:
    ours, theirs = identity(model), identity(copied(model, tmp_path), kv_slots=128, threads=1, max_model_len=512)
    assert ours == theirs
    assert ours.difference(theirs) is None


def test_each_fact_that_differs_is_named(model: Path, tmp_path: Path) -> None:
    ours = identity(model)
    weights = edit_tensors(copied(model, tmp_path / "weights"), lambda tensors: next(iter(tensors.values())).add_(1))
    layers = write_model(tmp_path / "layers", "llama", num_hidden_layers=3)
    theta = copied(model, tmp_path / "theta")
    edit_config(theta, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    other = copied(model, tmp_path / "tokenizer")
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    others = {
        "tokenizer: ": identity(other),
        "weights: ": identity(weights),
        "model: llama of 2 layers, ": identity(layers),
        "model: llama of": identity(theta),
        "quantization: none, not int8": identity(model, quantization="int8"),
        "kv_dtype: float32, not int8": identity(model, kv_dtype="int8"),
        "dtype: float32, not bfloat16": identity(model, dtype="bfloat16"),
        "operations: ": identity(model, eager=True),
    }
    for beginning, theirs in others.items():
        line = ours.difference(theirs)
        assert line is not None
        assert line.startswith(beginning)
        assert "\n" not in line


def test_features_are_a_part_of_an_identity(model: Path) -> None:
    """KV without the features that a target needs does not stand for its own, nor do other features."""
    taps = [FeatureTap((0,), width, lambda states: states, digest) for width, digest in ((64, "0a"), (64, "0b"))]
    plain, (ours, theirs) = identity(model), (identity(model, tap) for tap in taps)
    assert plain.difference(ours) == "features: none, not 64 of 0a"
    assert ours.difference(plain) == "features: 64 of 0a, not none"
    assert ours.difference(theirs) == "features: 64 of 0a, not 64 of 0b"
    assert ours.layout.described == "2 layers of [128, 128] bytes a head and features of 256 bytes"
    config = EngineConfig(target=model, dtype="float32")
    loaded = load_configured(config, model)
    executors = [TorchExecutor(loaded, num_slots=64, tap=tap) for tap in (None, *taps)]
    assert len({identities.kv_fingerprint(config, executor) for executor in executors}) == 3


def test_the_layout_of_8_bits_has_its_scales(model: Path) -> None:
    layout = identity(model, kv_dtype="int8").layout
    config = load_configured(EngineConfig(target=model, dtype="float32"), model).config
    assert layout.planes == [config.head_dim, config.head_dim, 4, 4]
    assert (layout.layers, layout.heads) == (config.num_hidden_layers, config.num_key_value_heads)
    assert layout.token_bytes == config.num_key_value_heads * (2 * config.head_dim + 8)
