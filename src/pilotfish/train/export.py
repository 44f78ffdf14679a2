import copy
import json
import platform
import shutil
from pathlib import Path
from typing import Any

import jinja2
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.model.loading.metadata import quiet
from pilotfish.train.evaluate import Evaluation
from pilotfish.train.recipes import PairRecipe
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
    record = json.loads(recipe.to_json())
    del record["sources"]  # paths on someone's machine are not for a model card
    for role, model in (("target", target), ("draft", draft)):
        generation = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
        export_model(model, tokenizer, generation, out / role)
        card = CARD.render(
            role=role,
            size=getattr(recipe, role),
            parameters=model.num_parameters(),
            recipe=recipe,
            record=json.dumps(record, indent=2),
            python=platform.python_version(),
            fallback=FALLBACK_HELD_OUT,
            result=result,
        )
        (out / role / "README.md").write_text(card)


def export_model(model: Any, tokenizer: Any, generation: GenerationConfig, directory: Path) -> None:
    """In bfloat16; replaces the directory."""
    shutil.rmtree(directory, ignore_errors=True)
    stored = copy.deepcopy(model).bfloat16()
    stored.generation_config = generation
    with quiet():
        stored.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(directory)
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files for their owner alone
