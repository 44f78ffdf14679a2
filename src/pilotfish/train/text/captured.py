"""The newest captured rows are held out: a draft is trained for what comes after all that it learnt."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from pilotfish.core.drafting.vocabulary import text_digest
from pilotfish.errors import InputError, ParameterError
from pilotfish.operate.capture.folder import check_folder, found_rows, refusing
from pilotfish.operate.capture.rows import CapturedRow
from pilotfish.operate.capture.upkeep import read_rows_of
from pilotfish.train.recipes import DistilRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.data import Tokens, Windows, token_type

#: One row in so many is held out, but at least LEAST of them.
HELD_OUT = 10
LEAST = 8


@dataclass(frozen=True)
class CapturedText:
    tokens: Tokens  # [tokens]: the end of a prompt, and its output
    prompt: int  # tokens of the prompt's end
    temperature: float


def read_captured(recipe: DistilRecipe, target: TaughtTarget) -> tuple[Windows, list[CapturedText]]:
    """Keeps a training row's worth of a prompt's end. InputError for too few rows, or another tokenizer's."""
    length, context = recipe.sequence_length, target.config.context
    if 2 * length > context:
        raise ParameterError("sequence_length", length, f"at most half the target's context, {context}")
    texts = [_text(row, length, target) for row in _rows(recipe.captured, text_digest(target.tokenizer))]
    if len(texts) < 2 * LEAST:
        raise InputError(f"from: {len(texts)} outputs were captured; {2 * LEAST} or more are needed")
    count = max(-(-len(texts) // HELD_OUT), LEAST)
    training = np.concatenate([text.tokens for text in texts[:-count]])
    if len(training) < 2 * length:
        raise InputError(f"from: {len(training)} tokens to train on; rows of {length} need {2 * length} or more")
    return Windows(training, recipe.batch_rows, length, context, recipe.seed), texts[-count:]


def _rows(folders: Sequence[Path], tokenizer: str) -> list[CapturedRow]:
    rows = list[CapturedRow]()
    for folder in folders:
        check_folder(folder)
        with refusing(folder):
            files = found_rows(folder)
        own = [row for file in files for row in read_rows_of(file)]
        if any(row.tokenizer != tokenizer for row in own):
            raise ParameterError("from", str(folder), "rows of the target's tokenizer alone; some are of another one")
        rows += own
    return sorted(rows, key=attrgetter("time"))


def _text(row: CapturedRow, length: int, target: TaughtTarget) -> CapturedText:
    vocab = target.config.vocab_size
    prompt = row.prompt_tokens[-length:]
    tokens = np.concatenate((prompt, row.output_tokens))
    if tokens.max() >= vocab:
        raise InputError(f"from: token {tokens.max()} was captured; the target's are those below {vocab}")
    return CapturedText(tokens.astype(token_type(vocab)), len(prompt), row.temperature)
