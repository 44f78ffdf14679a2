"""The finished pair as two Hugging Face model directories: weights, configuration, tokenizer, model card."""

import copy
import dataclasses
import json
import platform
import shutil
from pathlib import Path
from string import Template

from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.train.data import FALLBACK_HELD_OUT
from pilotfish.train.evaluate import Evaluation
from pilotfish.train.recipe import PairRecipe

SHARD_SIZE = "15MB"  # files stay under 16 MiB

CARD = Template(Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"))
PURPOSES = {
    "target": "The model whose output counts. Its draft, beside it, guesses what it will say next.",
    "draft": "A small model that guesses what the target beside it will say next.",
}


def export_pair(
    out: Path,
    recipe: PairRecipe,
    tokenizer: PreTrainedTokenizerFast,
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    result: Evaluation,
) -> None:
    """Write `out/target` and `out/draft`, replacing what is there."""
    for role, model in (("target", target), ("draft", draft)):
        directory = out / role
        shutil.rmtree(directory, ignore_errors=True)
        _save_model(model, directory)
        tokenizer.save_pretrained(directory)
        (directory / "README.md").write_text(_card(role, model, recipe, result))


def _save_model(model: LlamaForCausalLM, directory: Path) -> None:
    stored = copy.deepcopy(model).bfloat16()
    stored.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    stored.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files for their owner alone


def _card(role: str, model: LlamaForCausalLM, recipe: PairRecipe, result: Evaluation) -> str:
    fields = json.loads(recipe.to_json())
    del fields["sources"]  # paths on someone's machine are not for a model card
    figures = {name: f"{value:.3f}" for name, value in dataclasses.asdict(result).items()}
    return CARD.substitute(
        fields | fields[role] | figures,
        role=role,
        purpose=PURPOSES[role],
        method=_method(role, recipe),
        data=_data(recipe),
        rate=recipe.learning_rate if role == "target" else recipe.draft_learning_rate,
        parameters=f"{model.num_parameters():,}",
        recipe=json.dumps(fields, indent=2),
    )


def _data(recipe: PairRecipe) -> str:
    packages = ", ".join(f"`{name}`" for name in recipe.held_out)
    if recipe.sources:
        return (
            f"The `.py` files given to the recipe. Held out, and never trained on: the packages {packages}, "
            f"or one file in {FALLBACK_HELD_OUT} where none of these is among them."
        )
    return (
        f"The standard-library sources of Python {platform.python_version()}, without tests and generated "
        f"tables. Held out, and never trained on: the packages {packages}."
    )


def _method(role: str, recipe: PairRecipe) -> str:
    if role == "target":
        return f"Next-token prediction on {recipe.target_tokens:,} tokens."
    start = "the target's embeddings and layers" if recipe.shares_width else "random weights"
    return (
        f"Started from {start}, then taught the target's whole distribution (forward KL, temperature 1) on "
        f"{recipe.draft_tokens:,} tokens, half of them out of {recipe.sampled_tokens:,} the target wrote."
    )
