"""`train_pair`: every stage of a pair, each resumed where it was left.

sources ─► corpus ─► tokenizer ─► target ─► its own text ─► draft ─► evaluation ─► two model directories
"""

from __future__ import annotations

import pilotfish.model  # noqa: F401  # before transformers, which it keeps from importing torchao

# isort: split

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.config.cache import made_once
from pilotfish.errors import ParameterError
from pilotfish.progress import PhaseProgress, PlannedPhase
from pilotfish.train.distil import distillation
from pilotfish.train.evaluate import PLANNED, Evaluation, evaluate
from pilotfish.train.export import export_pair
from pilotfish.train.models import OWN_TEXT, build_model, predict, sample_text, start_from_target
from pilotfish.train.recipe import PairRecipe
from pilotfish.train.run_folder import cached, claim, training_device
from pilotfish.train.text.data import (
    Document,
    TokenBatch,
    Tokens,
    Windows,
    collect,
    encode,
    mixed,
    split,
    train_tokenizer,
)
from pilotfish.train.trainer import Learnt, Schedule, Trainer, matrices_of


def train_pair(recipe: PairRecipe, out: Path, run: Path, progress: PhaseProgress, device: str = "auto") -> Evaluation:
    """Train target and draft into `out/target` and `out/draft`; `run` keeps what resuming needs.

    `device` is one of PyTorch's, or `auto`: a CUDA device where there is one, else the CPU.
    """
    stages = PairTraining.of(recipe, run, training_device(device), progress)
    claim(run, recipe)
    tokenizer, training, held_out = stages.prepare_corpus()
    stages.plan()
    stages.train_target(training)
    stages.train_draft(training)
    result = evaluate(stages.target, stages.draft, held_out, recipe.sequence_length, recipe.seed, progress)
    with progress.phase("writing the pair"):
        export_pair(out, recipe, tokenizer, stages.target, stages.draft, result)
    return result


@dataclass(frozen=True)
class PairTraining:
    """The stages of a recipe; tokenizer, token rows and checkpoints are kept in `run`."""

    recipe: PairRecipe
    run: Path
    progress: PhaseProgress
    target: LlamaForCausalLM
    draft: LlamaForCausalLM

    @classmethod
    def of(cls, recipe: PairRecipe, run: Path, device: torch.device, progress: PhaseProgress) -> PairTraining:
        vocab, context, seed = recipe.vocab_size, recipe.context, recipe.seed
        target = build_model(recipe.target, vocab, context, seed).to(device)
        return cls(recipe, run, progress, target, build_model(recipe.draft, vocab, context, seed + 1).to(device))

    def prepare_corpus(self) -> tuple[PreTrainedTokenizerFast, Tokens, Tokens]:
        """The tokenizer, the tokens to train on, and those held out."""
        with self.progress.phase("reading the sources"):
            training, held_out = split(collect(self.recipe.sources, self.recipe.packages), self.recipe.held_out)
        with self.progress.phase("training the tokenizer"):
            folder = made_once(self.run / "tokenizer", partial(self._train_tokenizer, training))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        with self.progress.phase("tokenizing the sources"):
            tokens = cached(self.run / "training.npy", lambda: encode(training, tokenizer))
            return tokenizer, tokens, cached(self.run / "held_out.npy", lambda: encode(held_out, tokenizer))

    def _train_tokenizer(self, training: Sequence[Document], folder: Path) -> None:
        texts = (document.text for document in training)
        train_tokenizer(texts, self.recipe.vocab_size, self.recipe.context).save_pretrained(folder)

    def plan(self) -> None:
        batch, recipe = TokenBatch.blank(self.recipe.batch_rows, self.recipe.sequence_length), self.recipe
        trained = [trainer.plan(batch, self.progress) for trainer in (self._target_trainer(), self._draft_trainer())]
        written = 0 if self._sampled.exists() else recipe.sampled_tokens
        self.progress.plan(trained[0], PlannedPhase(OWN_TEXT, written), trained[1], *PLANNED)

    def train_target(self, corpus: Tokens) -> None:
        """By next-token prediction on the corpus."""
        self._target_trainer().run(self._windows(corpus, self.recipe.batch_rows).batch, self.progress)

    def train_draft(self, corpus: Tokens) -> None:
        """The draft, taught the target's whole distribution.

        A draft is asked to continue what the target wrote, so half of each batch is text sampled from the target; the
        rest is corpus text, which keeps the contexts as varied as prompts are.
        """
        recipe, length = self.recipe, self.recipe.sequence_length
        sampled = cached(
            self._sampled,
            lambda: sample_text(self.target, corpus, length, recipe.sampled_tokens, recipe.seed, self.progress),
        )
        if recipe.shares_width:
            start_from_target(self.draft, self.target)
        own = recipe.batch_rows // 2
        sources = self._windows(corpus, recipe.batch_rows - own), self._windows(sampled, own)
        self._draft_trainer().run(partial(mixed, sources), self.progress)

    @property
    def _sampled(self) -> Path:
        return self.run / "sampled.npy"

    def _target_trainer(self) -> Trainer:
        target, recipe = self.target, self.recipe

        def loss_of(tokens: Tensor, positions: Tensor) -> Learnt:
            return Learnt(F.cross_entropy(predict(target, tokens, positions).flatten(0, 1), tokens[:, 1:].flatten()))

        schedule = self._schedule(recipe.target_tokens, recipe.learning_rate)
        return Trainer(target, matrices_of(target.model.layers), schedule, self.run / "target", loss_of)

    def _draft_trainer(self) -> Trainer:
        schedule = self._schedule(self.recipe.draft_tokens, self.recipe.draft_learning_rate)
        return distillation(self.target.eval(), self.draft, schedule, self.run / "draft")

    def _schedule(self, tokens: int, learning_rate: float) -> Schedule:
        return Schedule(tokens, self.recipe.tokens_per_step, learning_rate, self.recipe.checkpoint_every)

    def _windows(self, tokens: Tokens, rows: int) -> Windows:
        length = self.recipe.sequence_length
        if len(tokens) < 2 * length:
            raise ParameterError("source", f"{len(tokens)} tokens", f"{2 * length} or more")
        return Windows(tokens, rows, length, self.recipe.context, self.recipe.seed)
