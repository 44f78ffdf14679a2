import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pilotfish.engine import pairs
from pilotfish.engine.pairs import inflate, resolve_pair
from pilotfish.errors import ParameterError


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


def test_plain_name_is_the_bundled_pair(bundled: Path) -> None:
    pair = resolve_pair("pycode")
    assert pair.target == bundled / "pairs/pycode/target"
    assert pair.draft == bundled / "pairs/pycode/draft"


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


def test_inflated_target_computes_the_same(bundled: Path) -> None:
    pair = resolve_pair("pycode@3m")
    torch.testing.assert_close(_logits(pair.target), _logits(resolve_pair("pycode").target), atol=1e-12, rtol=0)
    assert pair.draft == bundled / "pairs/pycode/draft"


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
        with pytest.raises(ParameterError, match="pair") as caught:
            resolve_pair(name)
        assert "\n" not in str(caught.value)


def test_sizes_below_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "MULTIPLE", 1)
    config = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    with pytest.raises(ParameterError, match="2m or more"):
        inflate._ffn(config, 1_200_000, 1)
