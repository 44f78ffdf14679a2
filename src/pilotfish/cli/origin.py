"""Who wrote which text: what the draft had guessed, and what the target added."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Delta
from pilotfish.engine.text import TextStream

DRAFTED, OWN = "bold green", "magenta"


def shows_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


class OriginStream:
    """Follows one sample's deltas and finds where in their text the draft's part ends."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._stream = TextStream(tokenizer, params.stop, params.min_tokens)

    def drafted(self, delta: Delta) -> int:
        """How many characters of `delta.text` the draft had guessed: they come first. A character belongs to the
        token that completes it."""
        pieces = []
        for token in delta.tokens:
            self._stream.add(token)
            pieces.append(self._stream.take())
        return sum(map(len, pieces[: delta.accepted]))

    def coloured(self, delta: Delta) -> Text:
        """The text of `delta`, both parts in their colours."""
        end = self.drafted(delta)
        return Text.assemble((delta.text[:end], DRAFTED), (delta.text[end:], OWN))
