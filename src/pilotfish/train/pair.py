"""`train_pair`: every stage of a pair, each resumed where it was left.

sources ─► corpus ─► tokenizer ─► target ─► its own text ─► draft ─► evaluation ─► two model directories
"""

import pilotfish.model  # noqa: F401  # before transformers, which it keeps from importing torchao

# isort: split

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.errors import ParameterError
from pilotfish.train.data import TokenBatch, Tokens, Windows, collect, encode, split, train_tokenizer
from pilotfish.train.evaluate import Evaluation, evaluate
from pilotfish.train.export import export_pair
from pilotfish.train.models import build_model, predict, sample_text, start_from_target
from pilotfish.train.recipe import PairRecipe
from pilotfish.train.trainer import Trainer


def train_pair(recipe: PairRecipe, out: Path, run: Path, progress: Progress, device: str = "auto") -> Evaluation:
    """Train target and draft into `out/target` and `out/draft`; `run` keeps what resuming needs.

    `device` is one of PyTorch's, or `auto`: a CUDA device where there is one, else the CPU.
    """
    stages = PairTraining(recipe, run, _device(device), progress)
    _claim(run, recipe)
    tokenizer, training, held_out = stages.prepare_corpus()
    target = stages.train_target(training)
    draft = stages.train_draft(training, target)
    result = evaluate(target, draft, held_out, recipe, progress)
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
        training, held_out = split(collect(self.recipe.sources), self.recipe.held_out)
        folder = self.run / "tokenizer"
        if not folder.exists():
            texts = (document.text for document in training)
            partial = self.run / "tokenizer.partial"
            train_tokenizer(texts, self.recipe.vocab_size, self.recipe.context).save_pretrained(partial)
            partial.rename(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokens = _cached(self.run / "training.npy", lambda: encode(training, tokenizer))
        return tokenizer, tokens, _cached(self.run / "held_out.npy", lambda: encode(held_out, tokenizer))

    def train_target(self, corpus: Tokens) -> LlamaForCausalLM:
        """The target, by next-token prediction on the corpus."""
        recipe = self.recipe
        target = build_model(recipe.target, recipe.vocab_size, recipe.context, recipe.seed).to(self.device)

        def loss_of(tokens: Tensor, positions: Tensor) -> Tensor:
            return F.cross_entropy(predict(target, tokens, positions).flatten(0, 1), tokens[:, 1:].flatten())

        batch_at = self._windows(corpus, recipe.batch_rows).batch
        trainer = Trainer(target.train(), recipe, recipe.target_tokens, recipe.learning_rate, self.run / "target")
        trainer.run(batch_at, loss_of, self.progress)
        return target

    def train_draft(self, corpus: Tokens, target: LlamaForCausalLM) -> LlamaForCausalLM:
        """The draft, taught the target's whole distribution.

        A draft is asked to continue what the target wrote, so half of each batch is text sampled from the target; the
        rest is corpus text, which keeps the contexts as varied as prompts are.
        """
        recipe, length = self.recipe, self.recipe.sequence_length
        sampled = _cached(
            self.run / "sampled.npy",
            lambda: sample_text(target, corpus, length, recipe.sampled_tokens, recipe.seed, self.progress),
        )
        draft = build_model(recipe.draft, recipe.vocab_size, recipe.context, recipe.seed + 1).to(self.device)
        if recipe.shares_width:
            start_from_target(draft, target)
        target.eval()
        own = recipe.batch_rows // 2
        sources = self._windows(corpus, recipe.batch_rows - own), self._windows(sampled, own)

        def batch_at(step: int) -> TokenBatch:
            return TokenBatch(*map(torch.cat, zip(*(windows.batch(step) for windows in sources), strict=True)))

        def loss_of(tokens: Tensor, positions: Tensor) -> Tensor:
            with torch.no_grad():
                taught = F.log_softmax(predict(target, tokens, positions), -1)
            learnt = F.log_softmax(predict(draft, tokens, positions), -1)
            # in nats a token
            return F.kl_div(learnt.flatten(0, 1), taught.flatten(0, 1), reduction="batchmean", log_target=True)

        trainer = Trainer(draft.train(), recipe, recipe.draft_tokens, recipe.draft_learning_rate, self.run / "draft")
        trainer.run(batch_at, loss_of, self.progress)
        return draft

    def _windows(self, tokens: Tokens, rows: int) -> Windows:
        length = self.recipe.sequence_length
        if len(tokens) < 2 * length:
            raise ParameterError("source", f"{len(tokens)} tokens", f"{2 * length} or more")
        return Windows(tokens, rows, length, self.recipe.context, self.recipe.seed)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ParameterError("device", name, "auto, cpu, or a CUDA device of this machine") from error


def _claim(run: Path, recipe: PairRecipe) -> None:
    """Make the run directory this recipe's own; another recipe's checkpoints would be resumed wrongly."""
    run.mkdir(parents=True, exist_ok=True)
    record = run / "recipe.json"
    if not record.exists():
        record.write_text(recipe.to_json())
    elif record.read_text() != recipe.to_json():
        raise ParameterError("run", str(run), "an empty directory, or one of the same recipe")


def _cached(path: Path, make: Callable[[], Tokens]) -> Tokens:
    """The token row kept at `path`, made and kept on the first call."""
    if not path.exists():
        partial = path.with_suffix(".partial.npy")
        np.save(partial, make())
        partial.replace(path)
    tokens: Tokens = np.load(path, mmap_mode="r")
    return tokens
