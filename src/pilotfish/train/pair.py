"""`train_pair`: every stage of a pair, each resumed where it was left.

sources ─► corpus ─► tokenizer ─► target ─► its own text ─► draft ─► evaluation ─► two model directories
"""

import json
import platform
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.config.cache import made_once
from pilotfish.errors import ParameterError
from pilotfish.progress import PhaseProgress
from pilotfish.train.distil import distillation
from pilotfish.train.evaluate import PLANNED, Evaluation, evaluate
from pilotfish.train.models import build_model, export_model, predict, start_from_target
from pilotfish.train.recipes import PairRecipe
from pilotfish.train.text import data
from pilotfish.train.text.data import TokenBatch, Tokens, Windows
from pilotfish.train.text.lessons import OWN, Writer, joined_text, plan_text
from pilotfish.train.text.passages import Passages
from pilotfish.train.trainer import Learnt, Schedule, Trainer, cached, claim, matrices_of, training_device


def train_pair(recipe: PairRecipe, out: Path, run: Path, progress: PhaseProgress, device: str = "auto") -> Evaluation:
    """Into `out/target` and `out/draft`; `run` keeps what resuming needs. `auto` is CUDA if there is a device."""
    where, length, seed = training_device(device), recipe.sequence_length, recipe.seed
    target = build_model(recipe.target, recipe.vocab_size, recipe.context, seed).to(where)
    draft = build_model(recipe.draft, recipe.vocab_size, recipe.context, seed + 1).to(where)
    claim(run, recipe)
    tokenizer, corpus, held_out = _read_corpus(recipe, run, progress)
    teaching = _next_token_training(target, recipe, run)
    distilling = distillation(
        target, draft, Schedule.of(recipe, recipe.draft_tokens, recipe.draft_learning_rate), run / "draft"
    )
    rows = -(-recipe.sampled_tokens // length)
    blank = TokenBatch.blank(recipe.batch_rows, length)
    first, last = (trainer.plan(blank, progress) for trainer in (teaching, distilling))
    progress.plan(first, plan_text(0 if (run / OWN).exists() else rows, length), last, *PLANNED)
    teaching.run(_windows(corpus, recipe, recipe.batch_rows).batch, progress)
    writer = Writer(target.eval(), length, seed, progress)
    own = cached(run / OWN, lambda: joined_text(writer.write(Passages(corpus, ()), rows, 1.0)))
    if recipe.draft.hidden == recipe.target.hidden:
        start_from_target(draft, target)
    # A draft is asked to continue what the target wrote; text of people keeps contexts as varied as prompts are.
    half = recipe.batch_rows // 2
    texts = _windows(corpus, recipe, recipe.batch_rows - half), _windows(own, recipe, half)
    distilling.run(partial(data.mixed, texts), progress)
    result = evaluate(target, draft, held_out, length, seed, progress)
    with progress.phase("writing the pair"):
        export_pair(out, recipe, tokenizer, target, draft, result)
    return result


def _read_corpus(
    recipe: PairRecipe, run: Path, progress: PhaseProgress
) -> tuple[PreTrainedTokenizerFast, Tokens, Tokens]:
    with progress.phase("reading the sources"):
        training, held_out = data.split(data.collect(recipe.sources, recipe.packages), recipe.held_out)

    def make_tokenizer(folder: Path) -> None:
        texts = (document.text for document in training)
        data.train_tokenizer(texts, recipe.vocab_size, recipe.context).save_pretrained(folder)

    with progress.phase("training the tokenizer"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(made_once(run / "tokenizer", make_tokenizer))
    with progress.phase("tokenizing the sources"):
        tokens = cached(run / "training.npy", lambda: data.encode(training, tokenizer))
        return tokenizer, tokens, cached(run / "held_out.npy", lambda: data.encode(held_out, tokenizer))


def _next_token_training(target: Any, recipe: PairRecipe, run: Path) -> Trainer:
    def loss_of(tokens: Tensor, positions: Tensor) -> Learnt:
        return Learnt(F.cross_entropy(predict(target, tokens, positions).flatten(0, 1), tokens[:, 1:].flatten()))

    schedule = Schedule.of(recipe, recipe.target_tokens, recipe.learning_rate)
    return Trainer(target, matrices_of(target.model.layers), schedule, run / "target", loss_of)


def _windows(tokens: Tokens, recipe: PairRecipe, rows: int) -> Windows:
    length = recipe.sequence_length
    if len(tokens) < 2 * length:
        raise ParameterError("source", f"{len(tokens)} tokens", f"{2 * length} or more")
    return Windows(tokens, rows, length, recipe.context, recipe.seed)


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
            fallback=data.FALLBACK_HELD_OUT,
            result=result,
        )
        (out / role / "README.md").write_text(card)
