"""`models check`: would it run, what would it take, why not."""

import json
import shutil
from pathlib import Path

import pytest
from command_runs import Refused, Run
from head_files import write_eagle3
from support import edit_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.heads.target import TargetFacts


def test_a_model_that_would_run(pilotfish: Run, llama: Path) -> None:
    result = pilotfish("models", "check", llama, "--json")
    assert (result.code, result.stderr) == (0, "")
    (row,) = result.rows
    assert row["would_run"] and row["problems"] == [] and row["draft"] is None
    assert row["target"]["architecture"] == "LlamaForCausalLM" and row["target"]["layers"] == "2 full"
    assert row["memory"]["total"] > row["memory"]["runtime"] > 0


def test_a_pair_is_looked_at_together(pilotfish: Run) -> None:
    result = pilotfish("models", "check", resolve_pair("pycode").target.parent)
    assert result.code == 0
    assert "draft" in result.stdout and "the draft takes what" in result.stdout
    assert result.stdout.rstrip().endswith("would run")


def test_windows_are_named(pilotfish: Run, tiny_models: dict[str, Path]) -> None:
    (row,) = pilotfish("models", "check", tiny_models["gemma2"], "--json").rows
    assert sorted(row["target"]["layers"].split(", ")) == ["1 full", "1 of window 16"]


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """Of the tiny Llama, to be changed."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def test_names_in_a_configuration_give_no_commands(pilotfish: Run, copy: Path) -> None:
    fields = json.loads((copy / "config.json").read_text())
    evil = "Evil\x1b[2J\x07\u202e\nwould run"
    for name, value in (("architectures", [evil]), ("model_type", evil), ("hidden_act", evil)):
        (copy / "config.json").write_text(json.dumps({**fields, name: value}))
        for command in (("models", "check", copy), ("generate", "--target", copy, "--prompt", "a")):
            result = pilotfish(*command)
            assert result.code == 2
            assert not set(result.stdout + result.stderr) & set("\x1b\x07\u202e")
            assert "\nwould run" not in result.stdout + result.stderr


def test_weights_that_are_missing_or_cut_off_are_found(pilotfish: Run, copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (row,) = pilotfish("models", "check", copy, "--json").rows
    assert not row["would_run"] and "cannot be read" in row["problems"][0]
    weights.unlink()
    index = '{"metadata": {}, "weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    (copy / "model.safetensors.index.json").write_text(index)
    result = pilotfish("models", "check", copy)
    assert result.code == 2
    assert "model-00002-of-00002.safetensors cannot be read" in result.stdout and "would not run" in result.stdout
    (copy / "config.json").unlink()
    (row,) = pilotfish("models", "check", copy, "--draft", copy, "--json").rows
    assert len(row["problems"]) == 2, "every problem of a pair"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 1}, "tensor model.layers.1."),
        ({"max_position_embeddings": 0}, "max_position_embeddings: 0 is not allowed; expected an integer of at least"),
        ({"architectures": None}, "architectures is None; a list of one of LlamaForCausalLM"),
    ],
)
def test_it_says_what_a_start_would_say(pilotfish: Run, copy: Path, changes: dict[str, object], reason: str) -> None:
    edit_config(copy, **changes)
    (row,) = pilotfish("models", "check", copy, "--json").rows
    (problem,) = row["problems"]
    started = pilotfish("generate", "--target", copy, "--prompt", "a")
    assert reason in problem and not row["would_run"]
    assert (started.code, started.stderr) == (2, f"pilotfish: {problem}\n")


def test_too_little_memory_is_a_problem_and_a_name_is_no_markup(pilotfish: Run, llama: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(llama, tmp_path / "a[" / "red]"))
    result = pilotfish("models", "check", copy, "--memory", 0.001)
    assert result.code == 2 and "problem: memory: " in result.stdout and "a[/red]" in "".join(result.stdout.split())


def test_a_tokenizer_without_structured_output(pilotfish: Run, llama: Path, copy: Path) -> None:
    """llguidance reads bytes alone."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0)], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(copy)
    result, (row,) = pilotfish("models", "check", copy), pilotfish("models", "check", copy, "--json").rows
    verdict = "would run, but no structured output: the model's tokenizer does not allow them: "
    assert result.code == 0 and result.stdout.splitlines()[-1].startswith(verdict)
    assert row["would_run"] and row["no_structured_output"].startswith("the model's tokenizer does not allow them: ")
    (plain,) = pilotfish("models", "check", llama, "--json").rows
    assert plain["no_structured_output"] is None


def test_entries_beyond_the_embedding_are_no_problem(pilotfish: Run, copy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save_pretrained(copy)
    result = pilotfish("models", "check", copy)
    assert result.code == 0 and result.stdout.rstrip().endswith("\nwould run")


def test_bad_usage(refused: Refused) -> None:
    assert "directory: 'nowhere' is not allowed" in refused("models", "check", "nowhere")
    assert "dtype: 'double' is not allowed" in refused("models", "check", ".", "--dtype", "double")
    assert "Missing argument" in refused("models", "check")


@pytest.fixture(scope="module")
def head(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained head of the tiny Llama, with random weights."""
    target, directory = TargetFacts.read(llama), tmp_path_factory.mktemp("head")
    layers = {"layers": (0, 1, 2), "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return write_eagle3(directory, "safeailab", target=target, **layers)


def test_a_head_is_told_with_its_target(pilotfish: Run, llama: Path, head: Path) -> None:
    result = pilotfish("models", "check", head, "--target", llama, "--json")
    assert (result.code, result.stderr) == (0, "")
    (row,) = result.rows
    assert row["would_run"] and row["draft"] is None and row["target"]["architecture"] == "LlamaForCausalLM"
    told = row["head"]
    assert (told["kind"], told["dialect"]) == ("eagle3", "safeailab")
    assert (told["hidden_states"], told["feature_width"]) == ("embeddings, 1, 2 of 2", 64)
    assert row["memory"]["draft"]["parameters"] > 0
    plain = pilotfish("models", "check", llama, "--draft", head)
    assert plain.code == 0
    assert "eagle3, in the layout of safeailab" in plain.stdout and "a token after the other" in plain.stdout
    (other,) = pilotfish("models", "check", head, "--target", llama, "--draft-layers", "0,2,-1", "--json").rows
    assert other["head"]["hidden_states"] == "embeddings, 2, final of 2"


def test_a_head_that_is_refused(pilotfish: Run, refused: Refused, llama: Path, head: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(head, tmp_path / "head"))
    edit_config(copy, vocab_size=511)
    result = pilotfish("models", "check", copy, "--target", llama)
    assert result.code == 2
    assert "is of a vocabulary of 511" in result.stdout and result.stdout.rstrip().endswith("would not run")
    assert "target: None is not allowed; expected the directory of its model" in refused("models", "check", head)
    assert "DIRECTORY is the target itself" in refused("models", "check", llama, "--target", llama)
