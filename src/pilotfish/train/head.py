"""`train_head`: a head of any target, end to end.

data ─► the target's own text ─► head, on the target's hidden states ─► evaluation ─► a directory of its own
"""

import pilotfish.model  # noqa: F401  # before transformers, which it keeps from importing torchao

# isort: split

from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from pilotfish.errors import ParameterError
from pilotfish.train.curves import draw_run
from pilotfish.train.data import Tokens
from pilotfish.train.evaluate_head import HeadEvaluation, evaluate_head
from pilotfish.train.head_shapes import head_of, trainee_of
from pilotfish.train.heads.trainee import Trainee
from pilotfish.train.learning import Teacher, learn
from pilotfish.train.lessons import Lessons, read_lessons, schedule_of
from pilotfish.train.places import Places
from pilotfish.train.run_folder import claim, training_device
from pilotfish.train.taught_recipe import HeadRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.trainer import Learnt, Trainer
from pilotfish.train.write_head import trained_files, write_head

#: Not for Muon: they stand for single tokens, or give one number.
OF_TOKENS = ("markov", "confidence", "lm_head")


def train_head(recipe: HeadRecipe, out: Path, run: Path, progress: Progress, device: str = "auto") -> HeadEvaluation:
    """Train a head of the recipe's target into `out/head`; `run` keeps what resuming needs, and the curves."""
    target = TaughtTarget(recipe.target, training_device(device))
    if recipe.draft_vocab >= target.config.vocab_size:
        raise ParameterError("draft_vocab", recipe.draft_vocab, f"less than the target's {target.config.vocab_size}")
    head = head_of(recipe, target)
    claim(run, recipe)
    lessons = read_lessons(recipe, target, run, progress)
    draft_ids = most_frequent(lessons.text, recipe.draft_vocab).to(target.device) if recipe.draft_vocab else None
    teacher = Teacher(target, head.projection.layers, draft_ids)
    trainee = trainee_of(head, target.shared(draft_ids), recipe)
    teach(trainee, teacher, lessons, recipe, run / recipe.kind, progress)
    draw_run(run / recipe.kind / "log.jsonl", run / "curves.svg", recipe.kind)
    result = evaluate_head(trainee, teacher, lessons, recipe.depth, progress)
    files = trained_files(trainee, head, recipe, target, draft_ids)
    write_head(files, recipe, out / "head")
    return result


def most_frequent(text: Tokens, count: int) -> Tensor:
    """int64 [count], ascending: the tokens that a head of a smaller vocabulary can say."""
    order = np.argsort(-np.bincount(text, minlength=count), kind="stable")
    return torch.from_numpy(np.sort(order[:count]))


def teach(
    trainee: Trainee, teacher: Teacher, lessons: Lessons, recipe: HeadRecipe, directory: Path, progress: Progress
) -> None:
    places = Places(recipe.sequence_length, recipe.depth, recipe.anchors if recipe.kind == "dspark" else 0, recipe.seed)

    def batch_at(step: int) -> tuple[Tensor, ...]:
        tokens, positions = lessons.batch(step)
        return tokens[:, :-1], positions, places.of(len(tokens), step)

    def loss_of(tokens: Tensor, positions: Tensor, starts: Tensor) -> Learnt:
        return learn(teacher.judge(trainee, tokens, positions, starts))

    named = trainee.named_parameters()
    matrices = [p for name, p in named if p.ndim == 2 and not any(part in name for part in OF_TOKENS)]
    Trainer(trainee.train(), matrices, schedule_of(recipe), directory).run(batch_at, loss_of, progress)
