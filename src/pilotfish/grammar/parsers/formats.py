from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pilotfish.grammar.parsers import grammars, json_calls, pythonic
from pilotfish.grammar.parsers.grammars import CallGrammar, Tool, chosen
from pilotfish.grammar.parsers.json_calls import JsonCallParser, MistralParser
from pilotfish.grammar.parsers.pieces import OutputParser
from pilotfish.grammar.parsers.pythonic import PythonicParser
from pilotfish.grammar.parsers.pythonic_grammar import pythonic_grammar


@dataclass(frozen=True)
class ToolFormat:
    name: str
    #: The parser must see the text of those that are special tokens.
    marks: tuple[str, ...]
    #: Reads an output that may call these tools.
    parser: Callable[[Sequence[Tool]], OutputParser]
    calls: CallGrammar

    def grammar(self, tools: Sequence[Tool], *, named: str | None, parallel: bool, added: Mapping[str, int]) -> str:
        """Lark's text of what `parser` reads as calls, arguments by the tools' schemas. One or more calls; exactly one
        if not `parallel`, or if `named`, of that tool. `added` are the tokenizer's added tokens, special or not, and
        their ids (transformers' `get_added_vocab()`): a mark among them is a token in the grammar, any other is text.
        """
        return self.calls(chosen(tools, named), parallel and named is None, added)


_hermes = partial(JsonCallParser, mark="<tool_call>", end="</tool_call>")
_llama3_json = partial(JsonCallParser, mark="<|python_tag|>", bare="{")
_pythonic = partial(PythonicParser, mark=pythonic.START, end=pythonic.END, bare="[")
_mistral = partial(MistralParser, mark=json_calls.CALLS)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    made.name: made
    for made in (
        ToolFormat("hermes", ("<tool_call>", "</tool_call>"), _hermes, grammars.hermes_grammar),
        ToolFormat("llama3_json", ("<|python_tag|>",), _llama3_json, grammars.llama3_json_grammar),
        ToolFormat("pythonic", (pythonic.START, pythonic.END), _pythonic, pythonic_grammar),
        ToolFormat("mistral", (json_calls.CALLS, json_calls.ID, json_calls.ARGS), _mistral, grammars.mistral_grammar),
    )
}


def tool_format_of(chat_template: str | None) -> str | None:
    template = chat_template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # GLM and Qwen3-Coder write no JSON between the marks
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "func_name1(" in template:
        return "pythonic"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": dictionary' in template else None
