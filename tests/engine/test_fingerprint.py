"""Targets with equal fingerprints give equal tokens; what changes tokens changes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import edit_config, edit_tensors, make_engine, write_model

from pilotfish.engine.fingerprint import all_but_weights, fingerprint, read_weights
from pilotfish.engine.targets.status import identity_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "first", "llama")


def of(directory: Path, **fields: Any) -> str:
    with make_engine(directory, **fields) as engine:
        return fingerprint(all_but_weights(engine), read_weights(directory).result(60.0))


def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "other"))


def test_neither_place_nor_speculation_nor_limits_change_it(model: Path, draft: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {"draft": draft, "mode": "sync", "max_requests": 3, "max_rows": 64, "kv_slots": 512}
    assert of(model) == of(copied(model, tmp_path), **own)


def test_each_byte_of_the_weights_counts(model: Path, tmp_path: Path) -> None:
    other = copied(model, tmp_path)

    def change(tensors: dict[str, Any]) -> None:
        last = list(tensors.values())[-1].reshape(-1)
        last[-1] += 1e-3

    edit_tensors(other, change)
    assert of(model) != of(other)
    path = other / "model.safetensors"
    before = read_weights(other).result(60.0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert read_weights(other).result(60.0) != before


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
def test_what_ends_an_output_and_what_makes_text_count(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
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


def test_the_digest_of_a_tokenizer_does_not_depend_on_its_calls(model: Path) -> None:
    with make_engine(model) as engine:
        before = identity_of(engine).tokenizer
        engine.tokenizer("a b c", truncation=True, max_length=2)
        assert identity_of(engine).tokenizer == before


def test_weights_that_cannot_be_read_are_told_to_whoever_asks(tmp_path: Path) -> None:
    assert "no safetensors weights" in str(read_weights(tmp_path).exception(60.0))
