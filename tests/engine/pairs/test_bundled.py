"""The pair that ships with the package."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.target import TargetFacts

MEBIBYTE = 2**20
PAIR = resolve_pair("pycode")
HEADS = {name: resolve_pair("pycode", name).draft for name in ("eagle3", "dspark")}
BOTH = pytest.mark.parametrize("directory", [PAIR.target, PAIR.draft], ids=["target", "draft"])
PROMPT = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n'
CODE = """import json


class Settings:
    def __init__(self, path):
        self.path = path
        self.values = {}

    def read(self):
        with open(self.path) as file:
            self.values = json.load(file)
        return self.values

    def get(self, name, default=None):
        if name not in self.values:
            return default
        return self.values[name]
"""


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_sizes() -> None:
    directories = (PAIR.target, PAIR.draft, *HEADS.values())
    files = [path for directory in directories for path in directory.glob("*.safetensors")]
    assert files and all(path.stat().st_size < 16 * MEBIBYTE for path in files)
    assert sum(map(_bytes, directories)) <= 48_000_000


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
    ids = AutoTokenizer.from_pretrained(PAIR.target)(CODE, return_tensors="pt").input_ids
    likeliest = []
    for directory in (PAIR.target, PAIR.draft):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            output = model(ids, labels=ids)
        assert output.loss < math.log(model.config.vocab_size) / 2
        likeliest.append(output.logits.argmax(-1))
    assert (likeliest[0] == likeliest[1]).float().mean() > 0.5


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_of_the_target_and_have_its_embedding_from_it(name: str) -> None:
    target = TargetFacts.read(PAIR.target)
    files = read_head(HEADS[name], target)
    assert files.spec.kind == name and files.spec.draft_vocab == target.vocab
    stored = {key for path in HEADS[name].glob("*.safetensors") for key in load_file(path)}
    assert stored.isdisjoint({"embed_tokens.weight", "lm_head.weight"})
    assert torch.equal(files.tensors["embed_tokens.weight"], target.embedding())
