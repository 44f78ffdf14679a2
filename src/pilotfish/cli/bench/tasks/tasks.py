"""Tasks whose outputs succeed or do not: those of tasks.toml, and rows of HumanEval's file.

Each kind says what the model is asked and how its output is judged; `Judge` holds what that needs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from pilotfish.cli.bench.tasks.sandbox import Sandbox
from pilotfish.cli.bench.workload import Prompt
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.errors import InputError, PromptError
from pilotfish.grammar.parsers.formats import TOOL_FORMATS, ToolFormat, tool_format_of
from pilotfish.grammar.parsers.grammars import Tool
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Piece, joined
from pilotfish.prompts import chat_prompt, lines_of

#: For models whose template shows no format of its own.
DEFAULT_FORMAT = "hermes"


class Judge:
    """A model's tokenizer and format of calls, a validator that knows nothing of our grammars, and a sandbox."""

    def __init__(self, tokenizer: Any, sandbox: Sandbox | None) -> None:
        self.tokenizer, self.sandbox = tokenizer, sandbox
        self._programs: dict[str, str] = {}
        own = tool_format_of(tokenizer.chat_template)
        self.format: ToolFormat = TOOL_FORMATS[own or DEFAULT_FORMAT]
        self.tells_tools = own is not None  # whether its template does

    def ask(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> str | list[int]:
        """As a chat where the model has a template."""
        listed = [{"type": "function", "function": tool} for tool in tools]
        if tools and not self.tells_tools:
            text, listed = f"Functions: {json.dumps(tools)}\n{text}\n", []
        if not self.tokenizer.chat_template:
            return text
        return chat_prompt([{"role": "user", "content": text}], self.tokenizer, {"tools": listed} if listed else None)

    def run(self, program: str) -> str:
        """Why a program does not pass; "" if it does. Equal programs run once."""
        assert self.sandbox is not None  # code is no task without one
        if program not in self._programs:
            self._programs[program] = self.sandbox.run(program)
        return self._programs[program]


def invalid(text: str, schema: Mapping[str, Any]) -> str:
    """Why a text is not what a schema wants; "" if it is."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        return f"no JSON: {error}"
    return next((error.message for error in validator().iter_errors(schema, value)), "")


def validator() -> Any:
    """InputError where it is not installed."""
    try:
        import jsonschema_rs
    except ImportError as error:
        message = "jsonschema-rs: what models write is validated by it: pip install 'pilotfish[eval]'"
        raise InputError(message) from error
    return jsonschema_rs


class Task(Struct, frozen=True):
    id: str
    prompt: str

    stop: ClassVar[tuple[str, ...]] = ()

    def asked(self, judge: Judge) -> Prompt:  # noqa: ARG002
        return Prompt(self.id, self.prompt)

    def params(self, judge: Judge) -> dict[str, Any]:  # noqa: ARG002
        return {"stop": self.stop}

    def failure(self, text: str, judge: Judge) -> str:
        """Why it is none, in one line; "" for a success."""
        raise NotImplementedError


class ExactTask(Task, frozen=True):
    """The rest of a line is the answer, and nothing else."""

    answer: str

    stop: ClassVar = ("\n",)

    def failure(self, text: str, judge: Judge) -> str:  # noqa: ARG002
        return "" if text.strip() == self.answer else f"not {self.answer!r} but {text.strip()!r}"


class CodeTask(Task, frozen=True):
    """The prompt, its completion and the test are a program that runs to its end."""

    test: str

    stop: ClassVar = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # where a function is over, in HumanEval

    def failure(self, text: str, judge: Judge) -> str:
        return judge.run(f"{self.prompt}{text}\n{self.test}")


class JsonTask(Task, frozen=True):
    """The output is JSON that a schema allows; its grammar is asked for, as with `response_format`."""

    schema: str

    def asked(self, judge: Judge) -> Prompt:
        return Prompt(self.id, judge.ask(self.prompt))

    def params(self, judge: Judge) -> dict[str, Any]:  # noqa: ARG002
        return {"structured_outputs": Constraint.json(json.loads(self.schema))}

    def failure(self, text: str, judge: Judge) -> str:  # noqa: ARG002
        return invalid(text, json.loads(self.schema))


class ToolTask(Task, frozen=True):
    """The output is calls that the tools' schemas allow; one is asked for, as with `tool_choice: required`."""

    tools: str

    def asked(self, judge: Judge) -> Prompt:
        return Prompt(self.id, judge.ask(self.prompt, json.loads(self.tools)))

    def params(self, judge: Judge) -> dict[str, Any]:
        added = judge.tokenizer.get_added_vocab()
        grammar = judge.format.grammar(self._tools, named=None, parallel=False, added=added)
        shown = any(mark in added for mark in judge.format.marks)
        return {"structured_outputs": Constraint.grammar(grammar), "skip_special_tokens": not shown}

    def failure(self, text: str, judge: Judge) -> str:
        parser = judge.format.parser(self._tools)
        pieces = joined([*parser.feed(text), *parser.finish()])
        known = {tool.name: tool.parameters or {} for tool in self._tools}
        calls = [(piece.name, _arguments(pieces, piece.index)) for piece in pieces if isinstance(piece, CallBegin)]
        if not calls:
            return "no call"
        for name, given in calls:
            if why := invalid(given, known[name]) if name in known else "there is no such tool":
                return f"{name}: {why}"
        return ""

    @property
    def _tools(self) -> list[Tool]:
        return [msgspec.convert(tool, Tool) for tool in json.loads(self.tools)]


def _arguments(pieces: Sequence[Piece], index: int) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == index)


#: By category, in the order of the report.
KINDS: dict[str, type[Task]] = {"exact": ExactTask, "json": JsonTask, "tools": ToolTask, "code": CodeTask}


def bundled_tasks() -> dict[str, list[Task]]:
    rows = msgspec.toml.decode(Path(__file__).with_name("tasks.toml").read_bytes())
    return {name: msgspec.convert(rows[name], list[kind]) for name, kind in KINDS.items()}  # type: ignore[valid-type]


def humaneval_tasks(path: Path) -> list[Task]:
    """Rows of `task_id` (or `id`), `prompt` (or `turns`), `test`, `entry_point`. PromptError names a bad one."""
    tasks: list[Task] = [_problem(line, place) for place, line in lines_of("humaneval", path)]
    if not tasks:
        raise InputError(f"humaneval: {path} has no rows; one JSON object a line is needed")
    return tasks


def _problem(line: bytes, place: str) -> CodeTask:
    try:
        row = json.loads(line)
        prompt = row["prompt"] if "prompt" in row else "".join(row["turns"])
        texts = (row["task_id"] if "task_id" in row else row["id"], prompt, row["test"], row["entry_point"])
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{place}: a row has task_id, prompt, test and entry_point: {error!r}") from error
    if not all(isinstance(text, str) and text for text in texts):
        raise PromptError(f"{place}: task_id, prompt, test and entry_point are texts that are not empty")
    name, prompt, test, entry = texts
    return CodeTask(name, prompt, f"{test}\ncheck({entry})\n")
