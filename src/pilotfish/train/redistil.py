"""A draft learns the traffic that it serves, as a server has captured it; one that is not accepted better is not kept.

captured rows, but for the newest ─► the present draft, trained on ─┐
the newest rows ─► how much of each draft is accepted ◄─────────────┴─► better by the margin: a model directory
"""

from __future__ import annotations

import pilotfish.model  # noqa: F401  # before transformers, which it keeps from importing torchao

# isort: split

from dataclasses import dataclass
from pathlib import Path

from pilotfish.progress import PhaseProgress
from pilotfish.train.curves import draw_run
from pilotfish.train.distil import distillation, export_draft, load_models
from pilotfish.train.evaluate_captured import CapturedEvaluation, evaluate_captured, plan_captured_evaluation
from pilotfish.train.run_folder import claim
from pilotfish.train.taught_recipe import DistilRecipe
from pilotfish.train.text.captured import read_captured
from pilotfish.train.text.data import TokenBatch
from pilotfish.train.text.lessons import schedule_of

#: Accepted tokens a step that a new draft must gain, unless somebody says otherwise.
MARGIN = 0.05


@dataclass(frozen=True)
class Redistillation:
    """Both drafts on the same outputs."""

    present: CapturedEvaluation
    new: CapturedEvaluation
    margin: float  # accepted tokens a step

    @property
    def gain(self) -> float:
        """Accepted tokens a step."""
        return self.new.accepted_a_step - self.present.accepted_a_step

    @property
    def better(self) -> bool:
        return self.gain >= self.margin


def redistil(
    recipe: DistilRecipe, margin: float, out: Path, run: Path, progress: PhaseProgress, device: str = "auto"
) -> Redistillation:
    """Train the recipe's draft on its captured rows, into `out`/draft where it gains at least `margin` accepted tokens
    a step. `run` keeps what resuming needs, and no tokens of any row."""
    target, draft = load_models(recipe, device, progress)
    claim(run, recipe)
    with progress.phase("reading captured rows"):
        lessons, length = read_captured(recipe, target), recipe.sequence_length
    trainer = distillation(target.module, draft, schedule_of(recipe), run / "draft")
    trained = trainer.plan(TokenBatch.blank(recipe.batch_rows, length), progress)
    scored = plan_captured_evaluation(lessons.held_out)
    progress.plan(scored, trained, scored)
    present = evaluate_captured(target.module, draft, lessons.held_out, length, progress)
    trainer.run(lessons.windows.batch, progress)
    draw_run(run / "draft" / "log.jsonl", run / "curves.svg", "draft")
    new = evaluate_captured(target.module, draft, lessons.held_out, length, progress)
    made = Redistillation(present, new, margin)
    if made.better:
        export_draft(draft, target, out / "draft", progress)
    return made
