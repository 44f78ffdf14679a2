"""The pair that ships with the package."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pilotfish.pairs import resolve_pair

MEBIBYTE = 2**20
PAIR = resolve_pair("pycode")
BOTH = pytest.mark.parametrize("directory", [PAIR.target, PAIR.draft], ids=["target", "draft"])
PROMPT = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n'


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_sizes() -> None:
    files = [path for directory in (PAIR.target, PAIR.draft) for path in directory.glob("*.safetensors")]
    assert files and all(path.stat().st_size < 16 * MEBIBYTE for path in files)
    assert _bytes(PAIR.target) + _bytes(PAIR.draft) <= 48 * MEBIBYTE


@BOTH
def test_configuration_and_card(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "llama" and config["max_position_embeddings"] == 8192
    card = (directory / "README.md").read_text()
    for word in ("asyncio", "email", "http", "unittest", "seed", "loss", "acceptance", "Python"):
        assert word in card
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], tokenize=False) == PROMPT


def test_draft_is_small_and_shares_the_vocabulary() -> None:
    assert json.loads((PAIR.draft / "config.json").read_text())["num_hidden_layers"] <= 2
    assert (PAIR.draft / "tokenizer.json").read_bytes() == (PAIR.target / "tokenizer.json").read_bytes()


def test_both_know_python_and_the_draft_agrees_with_the_target() -> None:
    ids = AutoTokenizer.from_pretrained(PAIR.target)(PROMPT, return_tensors="pt").input_ids
    likeliest = []
    for directory in (PAIR.target, PAIR.draft):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            output = model(ids, labels=ids)
        assert output.loss < math.log(model.config.vocab_size) / 2
        likeliest.append(output.logits.argmax(-1))
    assert (likeliest[0] == likeliest[1]).float().mean() > 0.5
