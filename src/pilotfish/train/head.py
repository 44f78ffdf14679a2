"""`train_head`: a head of any target, end to end.

data ─► the target's own text ─► head, on the target's hidden states ─► evaluation ─► a directory of its own
"""

from __future__ import annotations

import pilotfish.model  # noqa: F401  # before transformers, which it keeps from importing torchao

# isort: split

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pilotfish.errors import ParameterError
from pilotfish.model.heads.spec import Head
from pilotfish.progress import PhaseProgress, PlannedPhase
from pilotfish.train.evaluate import EVALUATION, HeadEvaluation, evaluate_head
from pilotfish.train.head_shapes import head_of, trainee_of
from pilotfish.train.heads.trainee import Trainee
from pilotfish.train.learning import Teacher, learn
from pilotfish.train.recipes import HeadRecipe
from pilotfish.train.run_folder import claim, training_device
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.data import TokenBatch, Tokens, mixed
from pilotfish.train.text.lessons import HELD_OUT_ROWS, plan_lessons, plan_text, write_lessons
from pilotfish.train.text.passages import read_passages
from pilotfish.train.trainer import Learnt, Schedule, Trainer
from pilotfish.train.write_head import trained_files, write_head

#: Not for Muon: they stand for single tokens, or give one number.
OF_TOKENS = ("markov", "confidence", "lm_head")


def train_head(
    recipe: HeadRecipe, out: Path, run: Path, progress: PhaseProgress, device: str = "auto"
) -> HeadEvaluation:
    """Into `out/head`; `run` keeps what resuming needs."""
    with progress.phase("loading the target"):
        target = TaughtTarget(recipe.target, training_device(device))
    if recipe.draft_vocab >= target.config.vocab_size:
        raise ParameterError("draft_vocab", recipe.draft_vocab, f"less than the target's {target.config.vocab_size}")
    head = head_of(recipe, target)
    claim(run, recipe)
    texts = read_passages(recipe, target, progress)
    trial = HeadTraining.of(recipe, head, target, torch.arange(recipe.draft_vocab))  # the text will tell which tokens
    batch = trial.batch(TokenBatch.blank(recipe.batch_rows, recipe.sequence_length), 0)
    planned = trial.trainer(run).plan(batch, progress)
    written = plan_text(HELD_OUT_ROWS, recipe.sequence_length)
    scored = PlannedPhase(EVALUATION, 2 * written.units / recipe.sequence_length)
    progress.plan(plan_lessons(recipe, run), planned, written, written, scored)
    lessons = write_lessons(texts, recipe, target, run, progress)
    text = np.concatenate([windows.tokens for windows in lessons.windows])
    training = HeadTraining.of(recipe, head, target, most_frequent(text, recipe.draft_vocab))
    trainer = training.trainer(run)
    trainer.run(lambda step: training.batch(mixed(lessons.windows, step), step), progress)
    result = evaluate_head(training.trainee, training.teacher, lessons, recipe.depth, progress)
    with progress.phase("writing the head"):
        files = trained_files(training.trainee, head, recipe, target, training.teacher.draft_ids)
        write_head(files, recipe, out / "head")
    return result


@dataclass(frozen=True)
class HeadTraining:
    recipe: HeadRecipe
    trainee: Trainee
    teacher: Teacher

    @classmethod
    def of(cls, recipe: HeadRecipe, head: Head, target: TaughtTarget, said: Tensor) -> HeadTraining:
        """`said`: the tokens that the head can say; none: all."""
        draft_ids = said.to(target.device) if len(said) else None
        teacher = Teacher(target, head.projection.layers, draft_ids)
        return cls(recipe, trainee_of(head, target.shared(draft_ids), recipe), teacher)

    def batch(self, lesson: TokenBatch, step: int) -> tuple[Tensor, ...]:
        return lesson.tokens[:, :-1], lesson.positions, places_of(self.recipe, len(lesson.tokens), step)

    def trainer(self, run: Path) -> Trainer:
        named = self.trainee.named_parameters()
        matrices = [p for name, p in named if p.ndim == 2 and not any(part in name for part in OF_TOKENS)]

        def loss_of(tokens: Tensor, positions: Tensor, starts: Tensor) -> Learnt:
            return learn(self.teacher.judge(self.trainee, tokens, positions, starts))

        schedule = Schedule.of(self.recipe, self.recipe.tokens, self.recipe.learning_rate)
        return Trainer(self.trainee, matrices, schedule, run / self.recipe.kind, loss_of)


def places_of(recipe: HeadRecipe, rows: int, step: int) -> Tensor:
    """int64 [rows, starts], ascending: tokens below which chains are guessed. dspark draws its anchors by step."""
    everywhere = torch.arange(1, recipe.sequence_length - recipe.depth + 1)
    if recipe.kind != "dspark" or recipe.anchors >= len(everywhere):
        return everywhere.expand(rows, -1)
    generator = torch.Generator().manual_seed((recipe.seed << 24) + step)
    drawn = [torch.randperm(len(everywhere), generator=generator)[: recipe.anchors] for _ in range(rows)]
    return everywhere[torch.stack(drawn)].sort(1).values


def most_frequent(text: Tokens, count: int) -> Tensor:
    """int64 [count], ascending."""
    order = np.argsort(-np.bincount(text, minlength=count), kind="stable")
    return torch.from_numpy(np.sort(order[:count]))
