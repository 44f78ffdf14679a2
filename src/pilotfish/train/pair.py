"""`train_pair`: every stage of a pair, each resumed where it was left.

sources ─► corpus ─► tokenizer ─► target ─► its own text ─► draft ─► evaluation ─► two model directories
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pilotfish.errors import ParameterError
from pilotfish.train.batches import Windows
from pilotfish.train.corpus import Document, Tokens, collect, encode, split
from pilotfish.train.distill import distill
from pilotfish.train.evaluate import Evaluation, evaluate
from pilotfish.train.export import export_pair
from pilotfish.train.loop import Plan
from pilotfish.train.models import build_model, start_from_target
from pilotfish.train.pretrain import pretrain
from pilotfish.train.recipe import PairRecipe
from pilotfish.train.sample import sample_text
from pilotfish.train.tokenizer import encode_texts, load_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Corpus:
    """The encoded text: training and held-out tokens, and the tokenizer that made them."""

    tokenizer: PreTrainedTokenizerFast
    training: Tokens
    held_out: Tokens


def train_pair(recipe: PairRecipe, out: Path, run: Path, progress: Progress, device: str = "auto") -> Evaluation:
    """Train target and draft into `out/target` and `out/draft`; `run` keeps what resuming needs.

    `device` is one of PyTorch's, or `auto`: a CUDA device where there is one, else the CPU.
    """
    place = _device(device)
    _claim(run, recipe)
    corpus = prepare_corpus(recipe, run)
    target = train_target(recipe, corpus, run, place, progress)
    draft = train_draft(recipe, corpus, target, run, place, progress)
    result = evaluate(target, draft, corpus.held_out, recipe, progress)
    export_pair(out, recipe, corpus.tokenizer, target, draft, result)
    return result


def prepare_corpus(recipe: PairRecipe, run: Path) -> Corpus:
    """Collect, split and encode; tokenizer and token rows are kept in `run`."""
    documents = split(collect(recipe.sources), recipe.held_out)
    folder = run / "tokenizer"
    if not folder.exists():
        texts = (document.text for document in documents.training)
        partial = run / "tokenizer.partial"
        train_tokenizer(texts, recipe.vocab_size, recipe.context).save_pretrained(partial)
        partial.rename(folder)
    tokenizer = load_tokenizer(folder)

    def encoded(part: tuple[Document, ...]) -> Tokens:
        return encode(part, lambda texts: encode_texts(tokenizer, texts), tokenizer.eos_token_id)

    training = _cached(run / "training.npy", lambda: encoded(documents.training))
    held_out = _cached(run / "held_out.npy", lambda: encoded(documents.held_out))
    return Corpus(tokenizer, training, held_out)


def train_target(
    recipe: PairRecipe, corpus: Corpus, run: Path, device: torch.device, progress: Progress
) -> LlamaForCausalLM:
    """The target, trained or restored."""
    target = build_model(recipe.target, recipe.vocab_size, recipe.context, recipe.seed).to(device)
    windows = _windows(recipe, corpus.training, recipe.batch_rows)
    plan = _plan(recipe, recipe.target_tokens, recipe.learning_rate)
    pretrain(target, windows, plan, run / "target", progress)
    return target


def train_draft(
    recipe: PairRecipe,
    corpus: Corpus,
    target: LlamaForCausalLM,
    run: Path,
    device: torch.device,
    progress: Progress,
) -> LlamaForCausalLM:
    """The draft, distilled from the target or restored."""
    length = recipe.sequence_length
    sampled = _cached(
        run / "sampled.npy",
        lambda: sample_text(target, corpus.training, length, recipe.sampled_tokens, recipe.seed, progress),
    )
    draft = build_model(recipe.draft, recipe.vocab_size, recipe.context, recipe.seed + 1).to(device)
    if recipe.shares_width:
        start_from_target(draft, target)
    own = recipe.batch_rows // 2
    sources = (_windows(recipe, corpus.training, recipe.batch_rows - own), _windows(recipe, sampled, own))
    plan = _plan(recipe, recipe.draft_tokens, recipe.draft_learning_rate)
    distill(draft, target, sources, plan, run / "draft", progress)
    return draft


def _windows(recipe: PairRecipe, tokens: Tokens, rows: int) -> Windows:
    if len(tokens) < 2 * recipe.sequence_length:
        raise ParameterError("source", f"{len(tokens)} tokens", f"{2 * recipe.sequence_length} or more")
    return Windows(tokens, rows, recipe.sequence_length, recipe.context, recipe.seed)


def _plan(recipe: PairRecipe, tokens: int, rate: float) -> Plan:
    return Plan(tokens // recipe.tokens_per_step, recipe.tokens_per_step, rate, recipe.checkpoint_every)


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
