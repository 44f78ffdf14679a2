"""Whose KV stands for whose: equal for equal models, and one line that names what differs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import edit_config, edit_tensors, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.engine.kv_identity import kv_identity
from pilotfish.engine.kv_tiers import kv_shape
from pilotfish.engine.memory import load_configured
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.loading.metadata import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "first", "llama")


def identity(directory: Path, tap: FeatureTap | None = None, **fields: Any) -> KVIdentity:
    config = EngineConfig(target=directory, **{"dtype": "float32", **fields})
    executor = TorchExecutor(load_configured(config, directory, config.max_model_len), num_slots=64, tap=tap)
    return kv_identity(config, executor, load_tokenizer(directory))


def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "other"))


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
    others = {
        "weights: ": identity(weights),
        "model: llama of 2 layers, ": identity(layers),
        "model: llama of": identity(theta),
        "quantization: none, not int8 of torchao ": identity(model, quantization="int8"),
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
    shapes = [kv_shape(EngineConfig(target=model, dtype="float32"), executor) for executor in executors_of(model, taps)]
    assert len(set(shapes)) == 3


def executors_of(model: Path, taps: Sequence[FeatureTap]) -> list[TorchExecutor]:
    """Without a tap, then with each."""
    loaded = load_configured(EngineConfig(target=model, dtype="float32"), model)
    return [TorchExecutor(loaded, num_slots=64, tap=tap) for tap in (None, *taps)]


def test_another_tokenizer_is_named(model: Path, tmp_path: Path) -> None:
    other = copied(model, tmp_path)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    line = identity(model).difference(identity(other))
    assert line is not None
    assert line.startswith("tokenizer: ")


def test_the_layout_of_8_bits_has_its_scales(model: Path) -> None:
    layout = identity(model, kv_dtype="int8").layout
    config = load_configured(EngineConfig(target=model, dtype="float32"), model).config
    assert layout.planes == [config.head_dim, config.head_dim, 4, 4]
    assert (layout.layers, layout.heads) == (config.num_hidden_layers, config.num_key_value_heads)
    assert layout.token_bytes == config.num_key_value_heads * (2 * config.head_dim + 8)
