"""The pair that ships with the package, its names, and larger targets that compute the same."""

import json
import math
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pilotfish.engine import pairs
from pilotfish.engine.pairs import BUNDLED, inflate, resolve_pair
from pilotfish.errors import ParameterError
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


def test_sizes() -> None:
    directories = (PAIR.target, PAIR.draft, *HEADS.values())
    files = [path for directory in directories for path in directory.glob("*.safetensors")]
    assert files and all(path.stat().st_size < 16 * MEBIBYTE for path in files)
    every = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in every) <= 48_000_000


def test_the_head_of_a_published_model() -> None:
    head = BUNDLED / "smollm2" / "eagle3"
    assert sum(path.stat().st_size for path in head.iterdir()) < 15_000_000
    (stored,) = (load_file(path) for path in head.glob("*.safetensors"))
    assert stored.keys().isdisjoint({"embed_tokens.weight", "lm_head.weight"}) and len(stored["d2t"]) == 8192
    assert len(json.loads((head / "config.json").read_text())["target_embedding_digest"]) == 64


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


# -- names, and targets that are inflated


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the bundled `pycode`: 0.3 M parameters in bfloat16."""
    monkeypatch.setattr(pairs, "BUNDLED", tmp_path / "pairs")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    for role in ("target", "draft"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "pairs" / "pycode" / role)
        (tmp_path / "pairs" / "pycode" / role / "tokenizer.json").write_text("{}")
    return tmp_path


def _logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    torch.manual_seed(1)
    with torch.no_grad():
        result: torch.Tensor = model(torch.randint(320, (2, 33))).logits
    return result


def test_a_pair_has_several_drafts(bundled: Path) -> None:
    folder = bundled / "pairs/pycode"
    (folder / "eagle3").mkdir()
    (folder / "eagle3/config.json").write_text("{}")
    pair = resolve_pair("pycode", "eagle3")
    assert (pair.target, pair.draft) == (folder / "target", folder / "eagle3")
    assert resolve_pair("pycode@3m", "eagle3").draft == folder / "eagle3"
    for name in ("target", "dspark", "../pycode/draft", ""):
        with pytest.raises(ParameterError, match="draft, eagle3; others need --target"):
            resolve_pair("pycode", name)


@pytest.mark.parametrize("millions", [1, 3, 11])
def test_inflated_size(bundled: Path, millions: int) -> None:
    target = resolve_pair(f"pycode@{millions}m").target
    config = json.loads((target / "config.json").read_text())
    stored = sum(tensor.numel() for path in target.glob("*.safetensors") for tensor in load_file(path).values())
    assert config["intermediate_size"] % 128 == 0
    assert abs(stored - millions * 1_000_000) <= 64 * 3 * 128 * 2  # half a step of 128 neurons
    assert (target / "tokenizer.json").exists()
    assert [path.name for path in (bundled / "cache/pairs").iterdir() if path.is_dir()] == [target.name]


@pytest.mark.usefixtures("bundled")
def test_added_neurons_do_work() -> None:
    target = resolve_pair("pycode@1m").target
    weights = {name: t for path in target.glob("*.safetensors") for name, t in load_file(path).items()}
    for name in ("gate", "up"):
        rows = weights[f"model.layers.0.mlp.{name}_proj.weight"].float()
        assert rows[256:].std().item() == pytest.approx(rows[:256].std().item(), rel=0.05)
    assert not weights["model.layers.0.mlp.down_proj.weight"][:, 256:].any()


def test_cached_until_the_weights_change(bundled: Path) -> None:
    first = resolve_pair("pycode@1m").target
    written = (first / "config.json").stat().st_mtime_ns
    assert resolve_pair("pycode@1m").target == first
    assert (first / "config.json").stat().st_mtime_ns == written
    (bundled / "pairs/pycode/target/tokenizer.json").write_text("{ }")
    assert resolve_pair("pycode@1m").target != first


@pytest.mark.usefixtures("bundled")
def test_large_models_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "SHARD_BYTES", 400_000)
    target = resolve_pair("pycode@1m").target
    assert len(list(target.glob("*.safetensors"))) > 2
    torch.testing.assert_close(_logits(target), _logits(resolve_pair("pycode").target), atol=1e-12, rtol=0)


def test_bad_names_are_refused() -> None:
    for name in ("", "llama", "pycode\n", "pycode@", "pycode@m", "pycode@344", "pycode@0m", "pycode@1m\n", "../x"):
        assert "pair" in refused(ParameterError, resolve_pair, name)


def test_sizes_below_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "MULTIPLE", 1)
    config = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    with pytest.raises(ParameterError, match="2m or more"):
        inflate._ffn(config, 1_200_000, 1)
