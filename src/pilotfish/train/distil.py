"""`train_distil`: a language model learns any target's whole distribution. `redistil`: the present draft learns
captured traffic; the new one is kept if the newest of it is accepted better by a margin."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.errors import ModelError
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.loader import load_dense
from pilotfish.progress import PhaseProgress
from pilotfish.train.evaluate import PLANNED, CapturedEvaluation, Evaluation, evaluate, evaluate_captured, plan_captured
from pilotfish.train.models import build_model, export_model, predict, start_from_target
from pilotfish.train.recipes import DistilRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.captured import read_captured
from pilotfish.train.text.data import TokenBatch, mixed
from pilotfish.train.text.lessons import joined_text, plan_lessons, write_lessons
from pilotfish.train.text.passages import read_passages
from pilotfish.train.trainer import Learnt, Schedule, Trainer, claim, matrices_of, training_device


def distillation(target: Any, draft: Any, schedule: Schedule, directory: Path) -> Trainer:
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
    target, draft, trainer = _prepare(recipe, run, progress, device)
    texts = read_passages(recipe, target, progress)
    trained = trainer.plan(TokenBatch.blank(recipe.batch_rows, recipe.sequence_length), progress)
    progress.plan(plan_lessons(recipe, run), trained, *PLANNED)
    lessons = write_lessons(texts, recipe, target, run, progress)
    trainer.run(partial(mixed, lessons.windows), progress)
    held_out, length = lessons.held_out.text, recipe.sequence_length
    if len(held_out) <= length:  # there are prompts alone
        held_out = joined_text(lessons.written(1.0))
    result = evaluate(target.module, draft, held_out, length, recipe.seed, progress)
    _export(draft, target, out, progress)
    return result


@dataclass(frozen=True)
class Redistillation:
    present: CapturedEvaluation
    new: CapturedEvaluation
    margin: float  # accepted tokens a step

    @property
    def gain(self) -> float:
        return self.new.accepted_a_step - self.present.accepted_a_step

    @property
    def better(self) -> bool:
        return self.gain >= self.margin


def redistil(
    recipe: DistilRecipe, margin: float, out: Path, run: Path, progress: PhaseProgress, device: str = "auto"
) -> Redistillation:
    """Written if it gains at least `margin` accepted tokens a step. `run` keeps no tokens of any row."""
    target, draft, trainer = _prepare(recipe, run, progress, device)
    with progress.phase("reading captured rows"):
        (windows, held_out), length = read_captured(recipe, target), recipe.sequence_length
    trained = trainer.plan(TokenBatch.blank(recipe.batch_rows, length), progress)
    scored = plan_captured(held_out)
    progress.plan(scored, trained, scored)
    present = evaluate_captured(target.module, draft, held_out, length, progress)
    trainer.run(windows.batch, progress)
    new = evaluate_captured(target.module, draft, held_out, length, progress)
    made = Redistillation(present, new, margin)
    if made.better:
        _export(draft, target, out, progress)
    return made


def _prepare(
    recipe: DistilRecipe, run: Path, progress: PhaseProgress, device: str
) -> tuple[TaughtTarget, Any, Trainer]:
    with progress.phase("loading the models"):
        target = TaughtTarget(recipe.target, training_device(device))
        draft = _starting_draft(recipe, target)
    claim(run, recipe)
    schedule = Schedule.of(recipe, recipe.tokens, recipe.learning_rate)
    return target, draft, distillation(target.module, draft, schedule, run / "draft")


def _starting_draft(recipe: DistilRecipe, target: TaughtTarget) -> Any:
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
    return load_dense(recipe.draft, config, torch.float32).to(target.device)


def _export(draft: Any, target: TaughtTarget, out: Path, progress: PhaseProgress) -> None:
    with progress.phase("writing the draft"):
        export_model(draft, target.tokenizer, target.module.generation_config, out / "draft")
