"""Counts and times of ended requests, never texts."""

import unicodedata
from collections import Counter
from typing import Literal

from msgspec import Struct

#: How an output was constrained.
OutputShape = Literal["text", "json", "grammar", "tools"]
#: Depths counted apart; deeper ones count as the last.
DEPTHS = 8
#: Value of a dimension that does not apply.
NONE = "none"
#: Scripts by the first word of their letters' Unicode names; all others count as OTHER_SCRIPT.
_ALPHABETS = "latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "bengali", "tamil", "thai", "hangul"
SCRIPTS = {name.upper(): name for name in _ALPHABETS} | {"CJK": "han", "HIRAGANA": "kana", "KATAKANA": "kana"}
OTHER_SCRIPT = "other"


class Cohort(Struct, frozen=True, kw_only=True):
    tag: str = NONE
    output: OutputShape = "text"
    temperature: str = "0"  # a band, as `temperature_band` has it
    context: str = "1"  # a band of prompt tokens, as `context_band` has it
    script: str = NONE  # most of the prompt's letters are of it: latin, cyrillic, han …
    client: str = NONE  # the name of the caller's key
    draft: str = NONE  # the revision of the draft that guessed for it, or its pool's name


class RequestOutcome(Struct, frozen=True, kw_only=True):
    """Sums of all outputs. A *step* is a forward of the target that gave tokens; one with a *tree* verified guesses."""

    ended: float  # seconds since the epoch
    variant: str
    cohort: Cohort
    cut: bool = False  # it ran without speculation because its variant was cut, for a part of it at least
    pinned: bool = False  # its tag chose the variant, or its client how to speculate: not chance
    failed: bool = False  # it was aborted, or broke
    ttft: float | None = None  # seconds to the first token
    itl: float | None = None  # mean seconds between two tokens of an output
    latency: float = 0.0  # seconds
    tokens: int = 0
    steps: int = 0
    trees: int = 0
    late: int = 0  # steps that wanted a tree and had none: the draft had nothing below the committed tokens yet
    nodes: int = 0
    accepted: int = 0
    guessable: int = 0  # of the steps, those that asked for guesses
    sharing: int = 0  # sequences among which these shared out their guesses, summed
    tried_by_depth: list[int] = []  # [up to DEPTHS] trees whose path was accepted up to the depth before, or the root
    accepted_by_depth: list[int] = []  # likewise: of them, those that were accepted at this depth
    valid: bool | None = None  # whether a constrained output kept its form; None: it was free
    score: float | None = None  # feedback, 0 to 1; it may come after the rest


def temperature_band(temperature: float) -> str:
    if temperature == 0:
        return "0"
    return "<=0.5" if temperature <= 0.5 else "<=1" if temperature <= 1 else ">1"


def context_band(prompt_tokens: int) -> str:
    """The greatest power of four up to it: 1, 4, 16 …"""
    return str(1 << 2 * ((max(prompt_tokens, 1).bit_length() - 1) // 2))


def script_of(text: str) -> str:
    found = Counter(unicodedata.name(letter, "").split(" ", 1)[0] for letter in text if letter.isalpha())
    return SCRIPTS.get(found.most_common(1)[0][0], OTHER_SCRIPT) if found else NONE
