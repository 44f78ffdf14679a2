"""How an output's text is parsed and constrained: calls of tools, reasoning, a format.

body ──┬─► tools.tool_use ─────► what may be called, and whether it must be ──┐
       └─► constraints.wanted ─► what else an output must be ─────────────────┼─► OutputReading
prompt ─► whether it has begun a reasoning, or ended it ──────────────────────┘
"""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pilotfish.config.server import ServerConfig
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.grammar.parsers import pieces
from pilotfish.grammar.parsers.formats import TOOL_FORMATS, ToolFormat, tool_format_of
from pilotfish.grammar.parsers.grammars import calls_or_json, text_and_calls
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser, reasoning_format_of
from pilotfish.operate.outcome import OutputShape
from pilotfish.server.bodies.constraints import FIELD, Wanted, blaming, wanted
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.bodies.requests import ChatRequest, GenerationRequest, TokenizeRequest
from pilotfish.server.bodies.tools import NO_TOOLS, ToolUse
from pilotfish.server.http_errors import bad, bad_request

FALLBACK = "hermes"  # how calls are written where the model's template does not tell
END = 32  # last tokens of a prompt that tell whether it ends within a reasoning
#: Tools whose calls a grammar can tell apart: from 500 on llguidance gives up in the midst of an output.
MOST_TOOLS = 256
#: Why tools are not in a prompt.
UNTOLD = "the model's chat template does not tell of them; --tool-template default tells of tools in a plain text"
SWITCHES = ("enable_thinking", "thinking")  # variables with which templates leave reasoning out


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_id() -> str:
    """Templates of Mistral's models accept only such ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def tells_of_tools(template: str | None) -> bool:
    return "tools" in (template or "")


@dataclass(frozen=True)
class OutputReading:
    parser: Callable[[], pieces.OutputParser] = pieces.ContentParser  # of one output
    constraint: Constraint | None = None
    field: str = FIELD  # of the body, which the constraint comes from
    shows_special: bool = False  # whether the parser must see special tokens
    use: ToolUse = NO_TOOLS
    call_id: Callable[[], str] = call_id

    @property
    def shape(self) -> OutputShape:
        if self.use is not NO_TOOLS:
            return "tools"
        if self.constraint is None:
            return "text"
        return "json" if self.constraint.kind == "json_schema" else "grammar"


def plain_reading(body: GenerationRequest) -> OutputReading:
    asked = wanted(body)
    return OutputReading() if asked is None else OutputReading(constraint=asked.constraint(), field=asked.field)


class OutputFormats:
    """`auto` takes the format of calls and reasoning from the chat template, `none` has none."""

    def __init__(self, config: ServerConfig, tokenizer: Any) -> None:
        template = tokenizer.chat_template
        calls = (tool_format_of(template) or FALLBACK) if config.tool_call_parser == "auto" else config.tool_call_parser
        thoughts = reasoning_format_of(template) if config.reasoning_parser == "auto" else config.reasoning_parser
        self.calls: ToolFormat | None = TOOL_FORMATS.get(calls)
        self.reasoning: ReasoningFormat | None = REASONING_FORMATS.get(thoughts or "none")
        self._tokenizer = tokenizer
        self.template: str = template or ""
        self._told = tells_of_tools(template)  # a model that is not told of tools does not know when to stop
        self._tool_template = config.tool_template
        start, end = self._thoughts = (self.reasoning.start, self.reasoning.end) if self.reasoning else ("", "")
        self._end_of_reasoning: list[int] = tokenizer.encode(end, add_special_tokens=False)
        first: list[int] = tokenizer.encode(start, add_special_tokens=False)
        self._start_of_reasoning = first[0] if len(first) == 1 else None
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def chat(self, body: ChatRequest, use: ToolUse, prompt: Sequence[int]) -> OutputReading:
        calls, (inside, comes), asked = self._calls(body, use), self._thinking(body, prompt), wanted(body)
        field, told = use.field if use.required or asked is None else asked.field, self._told or self.as_text(body)
        with blaming(field):
            constraint = self._constraint(asked, calls, use, told=told)
        if constraint is not None and comes:
            opening = None if inside else self._start_of_reasoning
            constraint = replace(constraint, after=self._end_of_reasoning, opening=opening)
        return OutputReading(
            parser=lambda: self._parser(body, calls, use, inside),
            constraint=constraint,
            field=field,
            shows_special=not self._special.isdisjoint((*self._thoughts, *(calls.marks if use.tools else ()))),
            use=use,
            call_id=mistral_id if calls.name == "mistral" else call_id,
        )

    def as_text(self, body: ChatRequest | TokenizeRequest) -> bool:
        has_any = body.tools or any(message.tool_calls or message.tool_call_id for message in body.messages or ())
        return bool(has_any) and not self._told and (body.tool_template or self._tool_template) == "default"

    def tell_lost(self, body: ChatRequest | TokenizeRequest, ignored: Ignored) -> None:
        if self.as_text(body):
            return
        if body.tools and not self._told:
            ignored.tell("tools", UNTOLD)
        if any(message.tool_calls for message in body.messages or ()) and "tool_calls" not in self.template:
            ignored.tell("messages[].tool_calls", UNTOLD)

    def _calls(self, body: ChatRequest, use: ToolUse) -> ToolFormat:
        """Calls that are enforced need no format that the model knows."""
        if self.calls is None and use.tools and not use.required:
            allowed = "none, required or a function, as --tool-call-parser of this server is none"
            raise bad("tool_choice", "auto", allowed)
        return TOOL_FORMATS[FALLBACK] if self.calls is None or self.as_text(body) else self.calls

    def _constraint(self, asked: Wanted | None, calls: ToolFormat, use: ToolUse, *, told: bool) -> Constraint | None:
        """Calls that must come, or the format asked for; a model that may call gets either, or text and calls."""
        of_answers = asked is not None and asked.field == "response_format"
        if use.required and asked is not None and not of_answers:
            raise bad_request(asked.field, "it cannot be combined with a tool_choice that requires a call")
        if use.required:
            return Constraint.grammar(self._grammar(calls, use, told=told))
        may_call, mark = told and bool(use.tools), calls.marks[0]
        if asked is not None and not (of_answers and may_call):
            return asked.constraint()
        if asked is not None:
            return Constraint.grammar(calls_or_json(self._grammar(calls, use, told=told), asked.schema()))
        if may_call and mark in self._added and any(tool.strict for tool in use.tools):
            return Constraint.grammar(text_and_calls(self._grammar(calls, use, told=told), mark))
        return None

    def _grammar(self, calls: ToolFormat, use: ToolUse, *, told: bool) -> str:
        if len(use.tools) > MOST_TOOLS:
            problem = f"of {len(use.tools)} tools no call can be enforced; expected {MOST_TOOLS} at most"
            raise bad_request("tools", problem)
        return calls.grammar(use.tools, named=use.named, parallel=use.parallel and told, added=self._added)

    def _thinking(self, body: ChatRequest, prompt: Sequence[int]) -> tuple[bool, bool]:
        """Whether the prompt has begun a reasoning, and whether the output has one, or its rest."""
        if self.reasoning is None:
            return False, False
        end = str(self._tokenizer.decode(prompt[-END:])).rstrip()
        inside, variables = self.reasoning.begins_inside(end), body.chat_template_kwargs or {}
        off = end.endswith(self.reasoning.end) or any(variables.get(name) is False for name in SWITCHES)
        return inside, inside or not off

    def _parser(self, body: ChatRequest, calls: ToolFormat, use: ToolUse, inside: bool) -> pieces.OutputParser:
        parser: pieces.OutputParser = calls.parser(use.tools) if use.tools else pieces.ContentParser()
        if use.required:  # all is calls: a text held back at the end is one that was cut before it had a name
            parser = FilteredPieces(parser, lambda _: True, lambda piece: not isinstance(piece, pieces.Content))
        if self.reasoning is not None:
            parser = ReasoningParser(self.reasoning, parser, inside)
        reasoning = body.include_reasoning is not False

        def wanted(piece: pieces.Piece) -> bool:
            if isinstance(piece, pieces.CallBegin | pieces.Arguments):
                return use.parallel or piece.index == 0
            return reasoning or not isinstance(piece, pieces.Reasoning)

        return parser if reasoning and use.parallel else FilteredPieces(parser, wanted, wanted)


class FilteredPieces:
    def __init__(
        self, inner: pieces.OutputParser, wants: Callable[[pieces.Piece], bool], at_end: Callable[[pieces.Piece], bool]
    ) -> None:
        self._inner, self._wants, self._at_end = inner, wants, at_end

    def feed(self, text: str) -> list[pieces.Piece]:
        return list(filter(self._wants, self._inner.feed(text)))

    def finish(self) -> list[pieces.Piece]:
        return list(filter(self._at_end, self._inner.finish()))
