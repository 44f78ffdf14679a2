"""Model directories that cannot be served are refused in one line that says why."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from support import CONTEXT, VOCAB, WINDOW, edit_config, native_model, tiny_model, weights

from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.configuration import layer_windows, load_config
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.metadata import load_tokenizer, read_generation_config
from pilotfish.model.loading.shards import refuse_indivisible


def refusal(directory: Path) -> str:
    assert issubclass(ModelError, ValueError)
    return refused(ModelError, load_model, directory, torch.float32, torch.device("cpu"), eager=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])  # 2 experts of 48 are as wide together as the other's MLP
def test_what_a_scored_row_costs(tiny_models: dict[str, Path], kind: str) -> None:
    attention, mlp = 64 * 32 * (4 + 2 + 2 + 4), 3 * 64 * 96
    head, scoring = VOCAB * 64, VOCAB * 128
    model = native_model(tiny_models[kind])
    assert model.scored_cost == pytest.approx(1 + (head + scoring) / (2 * (attention + mlp)))


@pytest.mark.parametrize(("value", "expected"), [(3, {3}), ([3, 5], {3, 5})])
def test_end_of_sequence_ids(copy: Path, value: object, expected: set[int]) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_model(copy, torch.float32, torch.device("cpu"), eager=True).generation.eos_ids == expected


def test_a_missing_directory(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path / "nothing")


def test_missing_weights(copy: Path) -> None:
    weights(copy).unlink()
    assert "no safetensors weights" in refusal(copy)


@pytest.mark.parametrize("kept", [0, 5, 1000, 20_000, None])
def test_truncated_weights_and_garbage(copy: Path, kept: int | None) -> None:
    weights(copy).write_bytes(b"\xff" * 4096 if kept is None else weights(copy).read_bytes()[:kept])
    assert f"weights in {weights(copy)} cannot be read" in refusal(copy)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no JSON: Expecting value: line 1 column 1"),
        ("{", "is no JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("[]", "holds a list; a JSON object is needed"),
        ('{"model_type": "llama"}', "architectures is None; a list of one of LlamaForCausalLM, "),
        ('{"architectures": "LlamaForCausalLM"}', "architectures is 'LlamaForCausalLM'; a list of one of Llama"),
        ('{"architectures": ["LlamaForCausalLM"], "model_type": "no-such-model"}', "cannot be read: "),
    ],
)
def test_a_corrupt_config(copy: Path, text: str, reason: str) -> None:
    path = copy / "config.json"
    path.write_text(text)
    assert refusal(copy).startswith(f"model: {path}") and reason in refusal(copy)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("vocab_size", "512", "an integer of at least 1"),
        ("vocab_size", 512.0, "an integer of at least 1"),
        ("num_attention_heads", 0, "an integer of at least 1"),
        ("hidden_size", True, "an integer of at least 1"),
        ("eos_token_id", "<eos>", "token ids 0 to "),
        ("eos_token_id", VOCAB, f"token ids 0 to {VOCAB - 1}"),
        ("eos_token_id", [1, -1], "token ids 0 to "),
    ],
)
def test_a_config_field_that_describes_no_model(copy: Path, field: str, value: object, allowed: str) -> None:
    edit_config(copy, **{field: value})
    shown = repr(value[-1] if isinstance(value, list) else value)
    expected = f"model: {copy / 'config.json'}: {field}: {shown} is not allowed; expected {allowed}"
    assert refusal(copy).startswith(expected)


@pytest.mark.parametrize("eos", [VOCAB, "<eos>", [True], 1.5])
def test_an_end_of_sequence_of_the_generation_config(copy: Path, eos: object) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert f"{copy / 'generation_config.json'}: eos_token_id: " in refusal(copy)


def test_more_experts_chosen_than_there_are(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_models["mixtral"], tmp_path / "model"))
    edit_config(copy, num_experts_per_tok=5)
    assert "num_experts_per_tok 5; 1 to its 4 experts" in refusal(copy)


@pytest.mark.parametrize(("model_type", "name"), [("llama4", "Llama4ForConditionalGeneration"), ("bert", "BertModel")])
def test_other_architectures_are_named(copy: Path, model_type: str, name: str) -> None:
    edit_config(copy, model_type=model_type, architectures=[name])
    message = refusal(copy)
    assert name in message
    assert "LlamaForCausalLM" in message


@pytest.mark.parametrize(("window", "seen"), [(None, 0), (CONTEXT, 0), (CONTEXT - 1, CONTEXT - 1), (WINDOW, WINDOW)])
def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path, window: int | None, seen: int) -> None:
    tiny_model("mistral", sliding_window=window).save_pretrained(tmp_path)
    assert layer_windows(load_config(tmp_path)) == (seen, seen)


ORIGINAL = 64
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("most", "rows"), [(ORIGINAL, ORIGINAL), (ORIGINAL + 1, ORIGINAL + 1), (0, 90)])
def test_factors_of_longrope_are_those_of_the_longest_sequence(
    tmp_path: Path, most: int, rows: int, eager: bool
) -> None:
    """transformers takes those of the batch. A sequence of one token has the same bits among others."""
    options = {"hidden_size": 128, "original_max_position_embeddings": ORIGINAL, "rope_parameters": {**LONGROPE}}
    reference: Any = tiny_model("phi3", sliding_window=None, **options).eval()
    reference.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"), eager=eager, max_model_len=most)
    executor, slots = TorchExecutor(loaded, 2 * rows), np.arange(2 * rows, dtype=np.int32)
    given, short = ([*range(3, count + 3)] for count in (rows, rows // 4))
    alone = executor.forward([SequenceRows(0, short, slots[rows:][: len(short)], NO_NODES, range(len(short)))])
    together = executor.forward(
        [
            SequenceRows(0, given, slots[:rows], NO_NODES, range(rows)),
            SequenceRows(0, short, slots[rows:][: len(short)], NO_NODES, range(len(short))),
        ]
    )
    expected = reference(torch.tensor([given])).logits[0]
    torch.testing.assert_close(together[:rows], expected, rtol=0, atol=1e-4)
    assert torch.equal(together[rows:], alone)


ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_theta": 1e4, **LONGROPE, "original_max_position_embeddings": ORIGINAL},
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "partial_rotary_factor": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen3", {"use_sliding_window": False}, "no sliding_window"),
        ("mistral", {"sliding_window": 0}, "sliding_window of 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"rope_parameters": ROPES["longrope"]}, "8 short and 8 long factors; 16 each"),
        ("llama", {"rope_parameters": {**ROPES["longrope"], "short_factor": ["a"] * 16}}, "no positive numbers"),
        (
            "llama",
            {"rope_parameters": {**ROPES["longrope"], "original_max_position_embeddings": 0}},
            "_embeddings 0; an",
        ),
        ("deepseek_v3", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers '1'; an integer of at least 0"),
        ("gemma3_text", {"rope_parameters": {"full_attention": ROPES["longrope"]}}, "longrope"),
        ("llama", {"rope_parameters": ROPES["partial_rotary_factor"]}, "partial_rotary_factor of 0.5"),
        ("glm4_moe", {"topk_group": 4}, "topk_group 4, of 3 groups; 2 experts are chosen"),
        ("glm4_moe", {"n_group": 6}, "n_group 6; 6 experts do not divide into so many"),
        (
            "ministral3",
            {"rope_parameters": ROPES["default"]},
            "lacks llama_4_scaling_beta or original_max_position_emb",
        ),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("llama", {"model_type": "mistral"}, "model_type mistral"),
        ("gemma2", {"hidden_activation": "relu"}, "activation relu"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        # what transformers leaves out of DeepSeek's routers
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True; False is supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'; 'softmax' is supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'; greedy and group_limited_greedy are"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group None; 6 experts do not divide into so many"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok None; 1 to its 6 experts"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2; 1 is supported"),
        ("deepseek_v3", {"n_group": 8}, "n_group 8; 8 experts do not divide into so many"),
        ("deepseek_v3", {"n_group": 3}, "n_group 3; 8 experts do not divide into so many"),
        ("deepseek_v3", {"topk_group": None}, "topk_group None, of 4 groups; 2 experts are chosen"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group 1, of 4 groups; 3 experts are chosen"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group 5, of 4 groups"),
        ("deepseek_v3", {"qk_rope_head_dim": 31}, "qk_rope_head_dim of 31; an even number is needed"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "1 num_key_value_heads; its 4 heads are needed"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank: 0 is not allowed"),
    ],
)
def test_what_would_be_served_wrong_is_refused(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    copy = Path(shutil.copytree(tiny_models[kind], tmp_path / "model"))
    edit_config(copy, **changes)
    message = refusal(copy)
    assert named in message
    assert str(copy) in message


def test_kimi_k2_is_a_deepseek_v3(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Without the code that its configuration names."""
    copy = Path(shutil.copytree(tiny_models["deepseek_v3"], tmp_path / "model"))
    remote = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling.Kimi"}
    usual = native_model(copy)
    edit_config(copy, model_type="kimi_k2", auto_map=remote)
    load_tokenizer(copy)
    kimi = native_model(copy)
    assert type(kimi.module) is type(usual.module) and kimi.config.model_type == "deepseek_v3"


def test_what_takes_no_latents_is_refused(tiny_models: dict[str, Path]) -> None:
    directory, cuda = tiny_models["deepseek_v2"], torch.device("cuda")
    line = refused(ParameterError, load_model, directory, torch.float32, cuda, eager=False)
    assert (
        line == "device: 'cuda' is not allowed; expected --eager for a DeepseekV2ForCausalLM: no kernel takes latents"
    )
    line = refused(ParameterError, refuse_indivisible, load_config(directory), 2)
    assert line == "tensor_parallel: 2 is not allowed; expected 1: attention to latents is not divided"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_new_tokens": 3}, ["min_new_tokens"]),
        ({"stop_strings": ["\n"], "bad_words_ids": [[3]]}, ["stop_strings", "bad_words_ids"]),
        ({"typical_p": 0.9, "num_beams": 4, "max_length": 20}, ["typical_p", "num_beams", "max_length"]),
        ({"typical_p": 1.0, "num_beams": 1, "min_length": 0, "stop_strings": None, "bad_words_ids": []}, []),
        ({"temperature": 0.5, "do_sample": True, "transformers_version": "5", "use_cache": True}, []),
    ],
)
def test_fields_without_effect_are_warned_about(
    copy: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], named: list[str]
) -> None:
    (copy / "generation_config.json").write_text(json.dumps(fields))
    read_generation_config(copy)
    told = [record.getMessage() for record in caplog.records]
    assert sorted(line.split()[1] for line in told) == sorted(named)
    assert all("is not supported and has no effect" in line for line in told)


def test_integers_may_be_written_with_a_point(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"top_k": 50.0, "max_new_tokens": 32.0, "temperature": 1.0}')
    defaults = read_generation_config(copy).defaults
    assert defaults == {"top_k": 50, "max_tokens": 32, "temperature": 1.0}
    assert type(defaults["top_k"]) is int
    (copy / "generation_config.json").write_text('{"top_k": 50.5}')
    with pytest.raises(ModelError, match=r"generation_config.json: top_k: 50.5 is not allowed"):
        read_generation_config(copy)


@pytest.mark.parametrize("kind", ["TokenizersBackend", "LlamaTokenizer"])
def test_a_missing_tokenizer(copy: Path, kind: str) -> None:
    """From an empty directory transformers makes some kinds of tokenizer, with three tokens."""
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    assert refused(ModelError, load_tokenizer, copy) == f"tokenizer: {copy} has no tokenizer.json"


def test_a_tokenizer_is_loaded_without_a_word(copy: Path, foreign_lines: list[str]) -> None:
    edit_config(copy, eos_token_id=10_000)
    load_tokenizer(copy)
    assert foreign_lines == []


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("text", "reason"), [("{", "is no JSON: "), ("[]", "holds a list")])
def test_a_malformed_tokenizer(copy: Path, name: str, text: str, reason: str) -> None:
    (copy / name).write_text(text)
    assert refused(ModelError, load_tokenizer, copy).startswith(f"model: {copy / name} {reason}")


def test_a_tokenizer_of_an_unknown_kind(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "Nope"}}')
    line = refused(ModelError, load_tokenizer, copy)
    assert line.startswith(f"tokenizer: {copy / 'tokenizer.json'} cannot be used: ")


def test_a_tokenizer_says_nothing_of_lengths(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((llama / "tokenizer_config.json").read_text())
    directory = llama.parent / f"{llama.name}-short"
    shutil.copytree(llama, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 8}))
    assert len(load_tokenizer(directory).encode("a b c d e f g h i j k l m n o p")) > 8
    assert capfd.readouterr().err == ""
