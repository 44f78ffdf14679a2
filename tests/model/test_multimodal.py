"""Checkpoints of models that also read images: their text models are served as transformers runs them on texts."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from sizes import paired
from support import (
    CONTEXT,
    KINDS,
    MODES,
    SNIPPETS,
    VOCAB,
    drain,
    edit_config,
    edit_tensors,
    kept_bytes,
    make_engine,
    native_model,
    params,
    run,
    write_tokenizer,
)
from thread_ranks import on_threads, thread_groups
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from pilotfish.config.engine import EngineConfig
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.engine.checks import model_facts
from pilotfish.errors import ModelError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.metadata import load_tokenizer

CPU = torch.device("cpu")
_SEEN = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
#: What is special about the text model, and the model around it.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (KINDS["gemma3_text"], {"vision_config": {**_SEEN, "patch_size": 14}, "mm_tokens_per_image": 4}),
    "mistral3": (
        {"model_type": "mistral", "tie_word_embeddings": False},
        {"vision_config": {"model_type": "pixtral", "patch_size": 14, **_SEEN}, "tie_word_embeddings": False},
    ),
    "qwen3_vl": (
        {"rope_parameters": _MROPE},
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 64,
            }
        },
    ),
}


def config_of(directory: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return fields


def written(directory: Path, kind: str, *, plain: bool = False) -> Any:
    """transformers' model, and a directory of it; with `plain` names of tensors, as older files have them or newer."""
    text, whole = WHOLE[kind]
    config = CONFIG_MAPPING[kind](text_config={**_TEXT, **text}, **whole)
    torch.manual_seed(3)
    model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    model.save_pretrained(directory, save_original_format=not plain)
    write_tokenizer(directory)
    return model


@pytest.mark.parametrize(("kind", "eager"), paired(WHOLE, [True, False]))
@pytest.mark.parametrize("plain", [False, True])
def test_logits_of_texts_are_those_of_transformers(tmp_path: Path, kind: str, plain: bool, eager: bool) -> None:
    reference, tokens = written(tmp_path, kind, plain=plain), [*range(5, 60)]
    rows = SequenceRows(0, tokens, np.arange(55, dtype=np.int32), NO_NODES, range(55))
    logits = TorchExecutor(load_model(tmp_path, torch.float32, CPU, eager=eager), 64).forward([rows])
    expected = reference(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.fixture(params=WHOLE)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    written(tmp_path, request.param)
    return tmp_path


def test_the_text_model_alone_is_planned_and_kept(directory: Path) -> None:
    planned = footprint(directory, torch.float32, CPU, eager=False)
    assert planned.weights == pytest.approx(kept_bytes(native_model(directory).module), rel=0.02)
    assert model_facts(directory, EngineConfig(target=directory, dtype="float32")).vocab_size == VOCAB
    text = config_of(directory)["text_config"]
    edit_config(directory, text_config={name: value for name, value in text.items() if name != "vocab_size"})
    facts = TargetFacts.read(directory)
    assert facts.vocab == VOCAB and facts.digest() and facts.lm_head().shape == (VOCAB, 64)


def test_ranks_compute_what_one_does(directory: Path) -> None:
    rows = SequenceRows(0, [*range(30)], np.arange(30, dtype=np.int32), NO_NODES, range(30))
    models = [load_model(directory, torch.float32, CPU, eager=False, group=group) for group in thread_groups(2)]
    ranks = [partial(TorchExecutor(model, 64).forward, [rows]) for model in models]
    alone = TorchExecutor(native_model(directory), 64).forward([rows])
    torch.testing.assert_close(on_threads(ranks)[0], alone, rtol=0, atol=1e-4)


def test_outputs_are_those_without_speculation(directory: Path) -> None:
    prompts, settings = SNIPPETS[:3], [params(16), params(16, temperature=0.0), params(16)]
    plain, engine = (
        run(make_engine(directory), prompts, settings),
        make_engine(directory, draft=directory, **MODES["sync"]),
    )
    samples = [engine.submit(*one)[0] for one in zip(prompts, settings, strict=True)]
    drain(engine)
    assert [sample.token_ids for sample in samples] == plain
    assert all(sample.request.stats.accepted_tokens for sample in samples)


def test_other_parts_may_miss_and_the_texts_may_not(directory: Path) -> None:
    def keep_the_text(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "language_model" not in name and "lm_head" not in name]:
            del tensors[name]

    def lose_a_norm(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("layers.1.input_layernorm.weight"))
        tensors["surplus.weight"] = tensors.pop(name)

    load_model(edit_tensors(directory, keep_the_text), torch.float32, CPU, eager=True)
    line = refused(ModelError, load_model, edit_tensors(directory, lose_a_norm), torch.float32, CPU, eager=True)
    assert "tensor surplus.weight has no place in the model" in line
    edit_tensors(directory, lambda tensors: tensors.pop("surplus.weight"))
    line = refused(ModelError, load_model, directory, torch.float32, CPU, eager=True)
    assert "lacks tensor model.layers.1.input_layernorm.weight" in line


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("gemma3", {"architectures": ["Llama4ForConditionalGeneration"]}, "is a Llama4ForConditionalGeneration; supp"),
        ("gemma3", {"model_type": "llama"}, "has no text_config of its model_type, as Gemma3ForConditional"),
        ("qwen3_vl", {"text_config": {"eos_token_id": "x"}}, "config.json cannot be read"),
        ("gemma3", {"text_config": {"hidden_size": 0}}, "hidden_size: 0 is not allowed"),
        ("gemma3", {"quantization_config": {"quant_method": "fp8"}}, "is a quantized Gemma3For"),
        ("mistral3", {"text_config": {"model_type": "falcon"}}, "is a FalconForCausalLM; supported are"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, kind: str, changes: dict[str, Any], named: str) -> None:
    written(tmp_path, kind)
    config = config_of(tmp_path)
    edit_config(tmp_path, **{**config, **changes})
    assert named in refused(ModelError, load_model, tmp_path, torch.float32, CPU, eager=True)


def test_a_processors_chat_template_is_the_tokenizers(tmp_path: Path) -> None:
    written(tmp_path, "gemma3")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"
