"""Who wrote which text: what the draft had guessed, and what the target added."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pilotfish.engine.sample import SampleDelta
from pilotfish.printable import printable_output

DRAFTED, OWN = "bold green", "magenta"


def shows_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


class OriginStream:
    """Follows one sample's deltas and finds where in their text the draft's part ends."""

    def __init__(self) -> None:
        self._shown = 0  # characters of the deltas so far

    def drafted(self, delta: SampleDelta) -> int:
        """How many characters of `delta.text` the draft had guessed: they come first. A character belongs to the
        token that completes it."""
        end = delta.ends[accepted - 1] if (accepted := delta.commit.accepted) else 0
        before, self._shown = self._shown, self._shown + len(delta.text)
        return min(max(end - before, 0), len(delta.text))

    def coloured(self, delta: SampleDelta) -> Text:
        """The text of `delta`, both parts in their colours, for a terminal."""
        end = self.drafted(delta)
        drafted, own = printable_output(delta.text[:end]), printable_output(delta.text[end:])
        return Text.assemble((drafted, DRAFTED), (own, OWN))
