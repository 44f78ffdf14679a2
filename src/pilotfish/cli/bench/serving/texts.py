"""Texts without any file: sentences and functions made of templates and a small vocabulary (texts.toml), seeded. They
read like reports, questions and code, but mean nothing; words repeat more than in real texts."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from pilotfish.config.hardware.tables import read_table
from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import ParameterError

#: Tokens more than are asked for, so that a text that is cut is long enough.
SLACK = 8
_PLACE = re.compile(r"\{(\w+)\}")

Kind = Literal["sentences", "functions", "questions", "tasks"]


class Vocabulary(Struct, frozen=True):
    """Templates of each kind, with places in braces, and the words for each place."""

    templates: dict[Kind, list[str]]
    words: dict[str, list[str]]


VOCABULARY = read_table(__file__, "texts", Vocabulary)


def load_counter(path: str) -> Any:
    """To count lengths with: a tokenizer.json, or the bundled pair's. ParameterError for what is none."""
    from tokenizers import Tokenizer

    file = path or str(resolve_pair("pycode").target / "tokenizer.json")
    try:
        return Tokenizer.from_file(file)
    except Exception as error:  # the library raises bare ones
        raise ParameterError("tokenizer", path, f"a tokenizer.json ({error})") from error


class TextMaker:
    """Gives texts of a seed, the same ones each time, of so many tokens by a tokenizer."""

    def __init__(self, tokenizer: Any, seed: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.draw = np.random.default_rng(seed)

    def choice(self, options: Sequence[str]) -> str:
        return options[int(self.draw.integers(len(options)))]

    def length(self, mean: int, spread: float) -> int:
        """At least 1, and by up to `spread` of the mean from it."""
        return max(1, round(mean * (1 + spread * float(self.draw.uniform(-1, 1)))))

    def one(self, kind: Kind) -> str:
        return _PLACE.sub(lambda place: self._word(place[1]), self.choice(VOCABULARY.templates[kind]))

    def take(self, tokens: int, kind: Kind = "sentences") -> str:
        """A text of so many tokens, cut at its end; of a few more or less where it is tokenized with what stands
        beside it."""
        text, have = [], 0
        for piece in self._pieces(kind):
            text.append(piece)
            have += len(self._tokenizer.encode(piece, add_special_tokens=False).ids)
            if have >= tokens + SLACK:
                break
        ids = self._tokenizer.encode("".join(text), add_special_tokens=False).ids
        whole: str = self._tokenizer.decode(ids[:tokens], skip_special_tokens=False)
        return whole

    def _pieces(self, kind: Kind) -> Iterator[str]:
        while True:
            if kind == "functions":
                yield self.one(kind) + "\n\n"
            else:
                yield " ".join(self.one(kind) for _ in range(int(self.draw.integers(3, 7)))) + "\n"

    def _word(self, place: str) -> str:
        return str(self.draw.integers(2, 1000)) if place == "number" else self.choice(VOCABULARY.words[place])
