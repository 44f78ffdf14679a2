"""`distil`: a language model learns a target's whole distribution. `train_distil`: for any target, end to end.

data ─► the target's own text ─► draft ─► evaluation ─► a model directory
"""

import pilotfish.model  # noqa: F401  # before transformers, which it keeps from importing torchao

# isort: split

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.errors import ModelError
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.loader import load_weights
from pilotfish.progress import PhaseProgress
from pilotfish.train.curves import draw_run
from pilotfish.train.evaluate import PLANNED, Evaluation, evaluate
from pilotfish.train.export import save_model
from pilotfish.train.models import build_model, predict, start_from_target
from pilotfish.train.run_folder import claim, training_device
from pilotfish.train.taught_recipe import DistilRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.data import TokenBatch, Tokens
from pilotfish.train.text.lessons import Lessons, plan_lessons, read_texts, schedule_of, write_lessons
from pilotfish.train.trainer import Learnt, Schedule, Trainer, matrices_of


def distillation(target: Any, draft: Any, schedule: Schedule, directory: Path) -> Trainer:
    """Trains the draft towards what the target says after each token. Both are transformers' models."""

    def loss_of(tokens: Tensor, positions: Tensor) -> Learnt:
        with torch.no_grad():
            taught = F.log_softmax(predict(target, tokens, positions), -1)
        learnt = F.log_softmax(predict(draft, tokens, positions), -1)
        # in nats a token
        return Learnt(F.kl_div(learnt.flatten(0, 1), taught.flatten(0, 1), reduction="batchmean", log_target=True))

    return Trainer(draft, matrices_of(draft.base_model.layers), schedule, directory, loss_of)


def train_distil(
    recipe: DistilRecipe, out: Path, run: Path, progress: PhaseProgress, device: str = "auto"
) -> Evaluation:
    """Train a draft of the recipe's target into `out`; `run` keeps what resuming needs, and the curves."""
    length = recipe.sequence_length
    target, draft = load_models(recipe, device, progress)
    claim(run, recipe)
    texts = read_texts(recipe, target, progress)
    trainer = distillation(target.module, draft, schedule_of(recipe), run / "draft")
    trained = trainer.plan(TokenBatch.blank(recipe.batch_rows, length), progress)
    progress.plan(plan_lessons(recipe, run), trained, *PLANNED)
    lessons = write_lessons(texts, recipe, target, run, progress)
    trainer.run(lessons.batch, progress)
    draw_run(run / "draft" / "log.jsonl", run / "curves.svg", "draft")
    result = evaluate(target.module, draft, _held_out(lessons), length, recipe.seed, progress)
    export_draft(draft, target, out / "draft", progress)
    return result


def load_models(recipe: DistilRecipe, device: str, progress: PhaseProgress) -> tuple[TaughtTarget, Any]:
    """The target, and where the draft starts."""
    with progress.phase("loading the models"):
        target = TaughtTarget(recipe.target, training_device(device))
        return target, starting_draft(recipe, target)


def export_draft(draft: Any, target: TaughtTarget, directory: Path, progress: PhaseProgress) -> None:
    """A model directory with the target's tokenizer, in place of what is there."""
    with progress.phase("writing the draft"):
        shutil.rmtree(directory, ignore_errors=True)
        save_model(draft, target.module.generation_config, directory)
        target.tokenizer.save_pretrained(directory)


def starting_draft(recipe: DistilRecipe, target: TaughtTarget) -> Any:
    """Where the draft starts: a model that is there or, of a shape, a fresh Llama, which takes what it can from a
    target of the same width."""
    vocab = target.config.vocab_size
    if recipe.shape is not None:
        draft = build_model(recipe.shape, vocab, target.config.context, recipe.seed).to(target.device)
        if target.config.model_type == "llama" and recipe.shape.hidden == target.config.hidden_size:
            start_from_target(draft, target.module)
        return draft
    assert recipe.draft is not None
    config = load_config(recipe.draft)
    if config.vocab_size != vocab:
        known = f"{config.vocab_size} tokens, the target {vocab}"
        raise ModelError(f"draft: {recipe.draft} has {known}; the same vocabulary is needed")
    return load_weights(recipe.draft, config, torch.float32).to(target.device)


def _held_out(lessons: Lessons) -> Tokens:
    """Held-out text; where there are prompts alone, the target's answers."""
    text = lessons.held_out.text
    return text if len(text) > lessons.writer.length else np.concatenate([row.tokens for row in lessons.written(1.0)])
