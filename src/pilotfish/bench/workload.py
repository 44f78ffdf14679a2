"""Work that contestants are given: prompts, sampling settings, seeds."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise, zip_longest
from pathlib import Path

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import ParameterError, PromptError
from pilotfish.prompts import BadRow, Row, read_rows

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)
#: The two temperatures of every figure on speed and acceptance.
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Prompt:
    """A row of a prompt file; turns are joined as they are."""

    id: str
    text: str | list[int]  # or its tokens
    category: str = ""

    @property
    def seed(self) -> int:
        """Fixed for the prompt, whichever subset of a file is run."""
        return zlib.crc32(self.id.encode())

    def job(self, temperature: float, max_tokens: int, offset: int) -> Job:
        """A job with a seed of its own for each `offset`."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=self.seed + offset)
        return Job(self, f"T={temperature:g}", params)


@dataclass(frozen=True)
class Job:
    """A sequence to generate: a prompt under a named setting."""

    prompt: Prompt
    setting: str
    params: SamplingParams


@dataclass(frozen=True)
class Workload:
    """Prompts that are repeated, each time with another seed."""

    prompts: list[Prompt]
    temperature: float
    max_tokens: int

    def jobs(self, number: int, turn: int) -> list[Job]:
        """The jobs of a round; its number is `turn`."""
        repeated = enumerate(islice(cycle(self.prompts), number), 1000 * turn)
        return [prompt.job(self.temperature, self.max_tokens, offset) for offset, prompt in repeated]


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` rows of a prompt file; PromptError names the first row that is no prompt."""
    return [_prompt(row) for row in read_rows(path)[:limit]]


def _prompt(row: Row | BadRow) -> Prompt:
    if isinstance(row, BadRow):
        raise PromptError(f"{row.place}: {row.reason}")
    if not (text := "".join(row.texts)):
        raise PromptError(f"{row.place}: the prompt is empty")
    return Prompt(str(row.id), text, row.category)


def first_of_each(prompts: Sequence[Prompt], number: int | None) -> list[Prompt]:
    """The first `number` prompts of each category, one of each after the other; None: all, as they are."""
    if number is None:
        return list(prompts)
    kinds = dict.fromkeys(one.category for one in prompts)
    chosen = [[one for one in prompts if one.category == kind][:number] for kind in kinds]
    return [one for column in zip_longest(*chosen) for one in column if one is not None]


def jobs_at(prompts: Sequence[Prompt], temperature: float, max_tokens: int) -> list[Job]:
    """Every prompt at one temperature."""
    return [prompt.job(temperature, max_tokens, offset=0) for prompt in prompts]


def parse_numbers(field: str, text: str) -> list[int]:
    """Positive integers separated by commas."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ParameterError(field, text, "positive integers separated by commas")
    return [int(part) for part in parts]


def parse_shares(field: str, text: str) -> list[float]:
    """Numbers from 0 to 1 separated by commas."""
    numbers = [float(part) if _NUMBER.fullmatch(part) else -1.0 for part in text.split(",")]
    if not all(0 <= number <= 1 for number in numbers):
        raise ParameterError(field, text, "numbers from 0 to 1 separated by commas")
    return numbers


def parse_milliseconds(field: str, text: str) -> list[float]:
    """Numbers from 0 to 10,000 separated by commas, ascending."""
    numbers = [float(part) if _NUMBER.fullmatch(part) else -1.0 for part in text.split(",")]
    if not all(0 <= number <= 10_000 for number in numbers) or any(a >= b for a, b in pairwise(numbers)):
        raise ParameterError(field, text, "milliseconds from 0 to 10000, ascending, separated by commas")
    return numbers
