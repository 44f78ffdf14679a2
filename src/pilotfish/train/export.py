"""The finished pair as two Hugging Face model directories: weights, configuration, tokenizer, model card."""

import copy
import json
import platform
import shutil
from pathlib import Path

import jinja2
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.model.loading.metadata import quiet
from pilotfish.train.evaluate import Evaluation
from pilotfish.train.recipe import PairRecipe
from pilotfish.train.text.data import FALLBACK_HELD_OUT

SHARD_SIZE = "15MB"  # files stay under 16 MiB

CARD = jinja2.Template(
    Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
)


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
        save_model(model, GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0), directory)
        tokenizer.save_pretrained(directory)
        (directory / "README.md").write_text(_card(role, model, recipe, result))


def save_model(model: LlamaForCausalLM, generation: GenerationConfig, directory: Path) -> None:
    """In bfloat16."""
    stored = copy.deepcopy(model).bfloat16()
    stored.generation_config = generation
    with quiet():
        stored.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files for their owner alone


def _card(role: str, model: LlamaForCausalLM, recipe: PairRecipe, result: Evaluation) -> str:
    record = json.loads(recipe.to_json())
    del record["sources"]  # paths on someone's machine are not for a model card
    card: str = CARD.render(
        role=role,
        size=getattr(recipe, role),
        parameters=model.num_parameters(),
        recipe=recipe,
        record=json.dumps(record, indent=2),
        python=platform.python_version(),
        fallback=FALLBACK_HELD_OUT,
        result=result,
    )
    return card
