"""`train_pair`: every stage of a pair, each resumed where it was left.

sources ─► corpus ─► tokenizer ─► target ─► its own text ─► draft ─► evaluation ─► two model directories
"""

import pilotfish.model  # noqa: F401  # before transformers, which it keeps from importing torchao

# isort: split

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.errors import ParameterError
from pilotfish.train.data import Tokens, Windows, collect, encode, mixed, split, train_tokenizer
from pilotfish.train.distil import distil
from pilotfish.train.evaluate import Evaluation, evaluate
from pilotfish.train.export import export_pair
from pilotfish.train.models import build_model, predict, sample_text, start_from_target
from pilotfish.train.recipe import PairRecipe
from pilotfish.train.run_folder import cached, claim, training_device
from pilotfish.train.trainer import Learnt, Schedule, Trainer, matrices_of


def train_pair(recipe: PairRecipe, out: Path, run: Path, progress: Progress, device: str = "auto") -> Evaluation:
    """Train target and draft into `out/target` and `out/draft`; `run` keeps what resuming needs.

    `device` is one of PyTorch's, or `auto`: a CUDA device where there is one, else the CPU.
    """
    stages = PairTraining(recipe, run, training_device(device), progress)
    claim(run, recipe)
    tokenizer, training, held_out = stages.prepare_corpus()
    target = stages.train_target(training)
    draft = stages.train_draft(training, target)
    result = evaluate(target, draft, held_out, recipe.sequence_length, recipe.seed, progress)
    export_pair(out, recipe, tokenizer, target, draft, result)
    return result


@dataclass(frozen=True)
class PairTraining:
    """The stages of a recipe; tokenizer, token rows and checkpoints are kept in `run`."""

    recipe: PairRecipe
    run: Path
    device: torch.device
    progress: Progress

    def prepare_corpus(self) -> tuple[PreTrainedTokenizerFast, Tokens, Tokens]:
        """The tokenizer, the tokens to train on, and those held out."""
        training, held_out = split(collect(self.recipe.sources, self.recipe.packages), self.recipe.held_out)
        folder = self.run / "tokenizer"
        if not folder.exists():
            texts = (document.text for document in training)
            unfinished = self.run / "tokenizer.partial"
            train_tokenizer(texts, self.recipe.vocab_size, self.recipe.context).save_pretrained(unfinished)
            unfinished.rename(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokens = cached(self.run / "training.npy", lambda: encode(training, tokenizer))
        return tokenizer, tokens, cached(self.run / "held_out.npy", lambda: encode(held_out, tokenizer))

    def train_target(self, corpus: Tokens) -> LlamaForCausalLM:
        """The target, by next-token prediction on the corpus."""
        recipe = self.recipe
        target = build_model(recipe.target, recipe.vocab_size, recipe.context, recipe.seed).to(self.device)

        def loss_of(tokens: Tensor, positions: Tensor) -> Learnt:
            return Learnt(F.cross_entropy(predict(target, tokens, positions).flatten(0, 1), tokens[:, 1:].flatten()))

        batch_at = self._windows(corpus, recipe.batch_rows).batch
        schedule = self._schedule(recipe.target_tokens, recipe.learning_rate)
        trainer = Trainer(target.train(), matrices_of(target.model.layers), schedule, self.run / "target")
        trainer.run(batch_at, loss_of, self.progress)
        return target

    def train_draft(self, corpus: Tokens, target: LlamaForCausalLM) -> LlamaForCausalLM:
        """The draft, taught the target's whole distribution.

        A draft is asked to continue what the target wrote, so half of each batch is text sampled from the target; the
        rest is corpus text, which keeps the contexts as varied as prompts are.
        """
        recipe, length = self.recipe, self.recipe.sequence_length
        sampled = cached(
            self.run / "sampled.npy",
            lambda: sample_text(target, corpus, length, recipe.sampled_tokens, recipe.seed, self.progress),
        )
        draft = build_model(recipe.draft, recipe.vocab_size, recipe.context, recipe.seed + 1).to(self.device)
        if recipe.shares_width:
            start_from_target(draft, target)
        own = recipe.batch_rows // 2
        sources = self._windows(corpus, recipe.batch_rows - own), self._windows(sampled, own)
        schedule = self._schedule(recipe.draft_tokens, recipe.draft_learning_rate)
        distil(target.eval(), draft, partial(mixed, sources), schedule, self.run / "draft", self.progress)
        return draft

    def _schedule(self, tokens: int, learning_rate: float) -> Schedule:
        return Schedule(tokens, self.recipe.tokens_per_step, learning_rate, self.recipe.checkpoint_every)

    def _windows(self, tokens: Tokens, rows: int) -> Windows:
        length = self.recipe.sequence_length
        if len(tokens) < 2 * length:
            raise ParameterError("source", f"{len(tokens)} tokens", f"{2 * length} or more")
        return Windows(tokens, rows, length, self.recipe.context, self.recipe.seed)
