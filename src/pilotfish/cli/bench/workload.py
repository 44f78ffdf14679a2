"""Work that contestants are given: prompts, sampling settings, seeds."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import ParameterError, PromptError
from pilotfish.prompts import BadRow, Row, marks_turns, prompt_of, read_rows

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True)
class Prompt:
    """A row of a prompt file."""

    id: str
    text: str | Sequence[int]  # or its tokens
    category: str = ""

    @property
    def seed(self) -> int:
        """Fixed for the prompt, whichever subset of a file is run."""
        return zlib.crc32(self.id.encode())

    def job(self, temperature: float, max_tokens: int, offset: int) -> "Job":
        """A job with a seed of its own for each `offset`."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=self.seed + offset)
        return Job(self, f"T={temperature:g}", params)


@dataclass(frozen=True)
class Job:
    prompt: Prompt
    setting: str
    params: SamplingParams

    @property
    def whole(self) -> "Job":
        """Goes on to `max_tokens`: the end of sequence is a token like others."""
        return replace(self, params=replace(self.params, ignore_eos=True))


@dataclass(frozen=True)
class Workload:
    prompts: list[Prompt]
    temperature: float
    max_tokens: int

    def jobs(self, number: int, turn: int) -> list[Job]:
        repeated = enumerate(islice(cycle(self.prompts), number), 1000 * turn)
        return [prompt.job(self.temperature, self.max_tokens, offset) for offset, prompt in repeated]


def load_prompts(path: Path, limit: int | None = None, target: Path | None = None) -> list[Prompt]:
    """The first `limit` rows of a prompt file, turns in the chat template of a `target` that marks them, else joined as
    they are. PromptError names the first row that is no prompt."""
    tokenizer = None if target is None else chat_tokenizer(target)
    return [_prompt(row, tokenizer) for row in read_rows(path)[:limit]]


@cache
def chat_tokenizer(target: Path) -> Any:
    """None if its chat template marks no turns."""
    from pilotfish.model.loading.metadata import load_tokenizer

    tokenizer = load_tokenizer(target)
    return tokenizer if marks_turns(tokenizer) else None


def _prompt(row: Row | BadRow, tokenizer: Any) -> Prompt:
    if isinstance(row, BadRow):
        raise PromptError(f"{row.place}: {row.reason}")
    if not "".join(row.texts):
        raise PromptError(f"{row.place}: the prompt is empty")
    text = "".join(row.texts) if tokenizer is None else prompt_of(row, tokenizer, raw=False)
    return Prompt(str(row.id), text, row.category)


def first_of_each(prompts: Sequence[Prompt], number: int | None) -> list[Prompt]:
    """The first `number` prompts of each category, one of each after the other; None: all, as they are."""
    if number is None:
        return list(prompts)
    kinds = dict.fromkeys(one.category for one in prompts)
    chosen = [[one for one in prompts if one.category == kind][:number] for kind in kinds]
    return [one for column in zip_longest(*chosen) for one in column if one is not None]


def jobs_at(prompts: Sequence[Prompt], temperature: float, max_tokens: int) -> list[Job]:
    return [prompt.job(temperature, max_tokens, offset=0) for prompt in prompts]


def parse_choices(field: str, text: str, known: Sequence[Choice]) -> list[Choice]:
    by_name, names = {str(one): one for one in known}, text.split(",")
    if len(set(names)) < len(names) or not set(names) <= by_name.keys():
        raise ParameterError(field, text, f"some of {', '.join(by_name)}, separated by commas")
    return [by_name[name] for name in names]


def parse_numbers(field: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ParameterError(field, text, "positive integers separated by commas")
    return [int(part) for part in parts]
