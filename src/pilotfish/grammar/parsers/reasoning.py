import re
from collections.abc import Mapping
from dataclasses import dataclass

from pilotfish.grammar.parsers.call_parser import TextParser
from pilotfish.grammar.parsers.pieces import OutputParser, Piece, Reasoning
from pilotfish.grammar.parsers.reader import Reading

_LINE_ENDS = re.compile(r"[\r\n]*")
_ALL = re.compile(r"[\s\S]*")


@dataclass(frozen=True)
class ReasoningFormat:
    start: str
    end: str

    def begins_inside(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.start)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}


def reasoning_format_of(chat_template: str | None) -> str | None:
    template = chat_template or ""
    if "<｜Assistant｜>" in template and "</think>" in template:
        return "deepseek_r1"
    return next((name for name, made in REASONING_FORMATS.items() if made.end in template), None)


class ReasoningParser(TextParser):
    """Reasoning is the beginning up to the end mark, if the output or the prompt wrote the start mark; `inner` reads
    the rest. Line ends beside the marks belong to them."""

    def __init__(self, made: ReasoningFormat, inner: OutputParser, begins_inside: bool) -> None:
        super().__init__()
        self._format, self._inner, self._inside = made, inner, begins_inside
        self._plain = re.compile(rf"[^\r\n{re.escape(made.end[0])}]*")

    def _last(self) -> list[Piece]:
        return self._inner.finish()

    def _read(self) -> Reading[None]:
        yield from self._reader.span(_LINE_ENDS)
        if started := (yield from self._reader.mark((self._format.start,))):
            self._reader.take(len(started))
        if started or self._inside:
            self._reader.forget()
            yield from self._reader.span(_LINE_ENDS)
            yield from self._reason()
            yield from self._reader.span(_LINE_ENDS)
        else:
            self._answer(self._reader.taken())
        yield from self._reader.run(_ALL, self._answer)

    def _reason(self) -> Reading[None]:
        while (yield from self._reader.peek()):
            yield from self._reader.run(self._plain, self._think)
            line_ends = yield from self._reader.span(_LINE_ENDS)
            if mark := (yield from self._reader.mark((self._format.end,))):
                self._reader.take(len(mark))
                return
            self._think(line_ends)
            if (yield from self._reader.peek()) == self._format.end[0]:
                self._think(self._reader.take(1))

    def _think(self, text: str) -> None:
        self._reader.forget()
        if text:
            self._pieces.append(Reasoning(text))

    def _answer(self, text: str) -> None:
        self._reader.forget()
        self._pieces += self._inner.feed(text)
