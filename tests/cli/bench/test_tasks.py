"""Tasks can be solved, and what does not solve them is told apart; HumanEval's rows in both layouts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_runs import write_rows

from pilotfish.cli.bench.tasks.sandbox import Sandbox
from pilotfish.cli.bench.tasks.tasks import KINDS, CodeTask, Judge, Task, bundled_tasks, humaneval_tasks, validator
from pilotfish.errors import InputError, PromptError

TASKS = bundled_tasks()
#: Completions that solve the bundled tasks, by their ids.
CODE = {
    "add": "    return a + b",
    "largest": "    return max(numbers, default=None)",
    "is_even": "    return n % 2 == 0",
    "reversed_text": "    return text[::-1]",
    "count_vowels": "    return sum(letter in 'aeiou' for letter in text.lower())",
    "factorial": "    return n * factorial(n - 1)",
    "flatten": "        result += each\n    return result",
    "stack": "        return self.items.pop()",
    "clamp": "        return high\n    return value",
    "fibonacci": "        a, b = b, a + b\n    return a",
    "word_counts": "    for word in text.split():\n        counts[word] = counts.get(word, 0) + 1\n    return counts",
    "is_prime": "    return all(n % i for i in range(2, int(n**0.5) + 1))",
}
JSON: dict[str, Any] = {
    "person": {"name": "Rui", "age": 41, "city": "Lisbon"},
    "order": {"order": "AB-123456", "articles": [{"sku": "abc123", "count": 1}, {"sku": "xyz999", "count": 99}]},
    "sentiment": {"sentiment": "negative", "confident": True},
    "shape": {"kind": "rectangle", "width": 3, "height": 1000},
    "tree": {"folder": "src", "files": [{"name": "a.py", "bytes": 0}]},
    "date and time": {"day": "2025-06-17", "from": "11:30", "room": None},
    "matrix": [[1, 0], [0, -9]],
    "menu": {"gericht": "寿司", "größe": "groß", "preis": 12.5},
    "settings": {"host": "localhost", "port": 8000, "logging": {"level": "info", "json": False}, "tags": []},
    "optional fields": {"title": "Ulysses"},
}
CALLS: dict[str, Any] = {
    "weather": ("get_weather", {"city": "Porto", "unit": "celsius"}),
    "one of three": ("add_reminder", {"hour": 9, "text": "call Ana"}),
    "no arguments": ("get_time", {}),
    "nested arguments": ("book_table", {"when": {"hour": 12, "minute": 0}, "guests": ["meat", "vegan"]}),
    "a number": ("set_temperature", {"degrees": 19.5}),
    "an expression": ("calculate", {"expression": "12 * 34"}),
    "a reference": ("move", {"from": "e2", "to": "e4"}),
    "an optional argument": ("search", {"query": "hiking boots"}),
}
TEMPLATE = "{% if tools %}<tool_call>{{ tools }}{% endif %}{{ messages[0].content }}"
PROBLEM = {"prompt": "def two():\n", "test": "def check(f):\n    assert f() == 2\n", "entry_point": "two"}


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SOLUTIONS = {
    "exact": {task.id: f" {task.answer}" for task in TASKS["exact"]},  # type: ignore[attr-defined]
    "json": {name: json.dumps(value, ensure_ascii=False) for name, value in JSON.items()},
    "tools": {name: call(*each) for name, each in CALLS.items()},
    "code": CODE,
}
EVERY = [pytest.param(category, task, id=f"{category}: {task.id}") for category in KINDS for task in TASKS[category]]


class Tokenizer(SimpleNamespace):
    chat_template: str | None = None

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self, messages: Any, **arguments: Any) -> str:
        return json.dumps([messages, arguments.get("tools")])

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(Tokenizer(), Sandbox())


@pytest.mark.parametrize(("category", "task"), EVERY)
def test_a_task_can_be_solved(category: str, task: Task, judge: Judge) -> None:
    assert task.failure(SOLUTIONS[category][task.id], judge) == ""
    assert task.failure("", judge) != ""
    assert task.asked(judge).text and task.asked(judge).id == task.id


def test_every_task_has_a_name_of_its_own() -> None:
    counts = {category: len(SOLUTIONS[category]) for category in KINDS}
    assert {category: len(tasks) for category, tasks in TASKS.items()} == counts


@pytest.mark.parametrize(
    ("category", "name", "text", "reason"),
    [
        ("exact", "add", "8", "not '9' but '8'"),
        ("json", "person", '{"name": "Rui", "age": 41}', '"city" is a required property'),
        ("json", "person", '{"name": "Rui", "age": 141, "city": "Lisbon"}', "141 is greater than the maximum of 130"),
        ("json", "person", '{"name": "Rui", "age": 41, "city": "Lis', "no JSON: Input data was truncated"),
        ("json", "matrix", "[[1, 0], [0, NaN]]", "no JSON"),
        ("json", "shape", '{"kind": "circle", "width": 3}', "not valid under any of the schemas"),
        ("tools", "weather", "It rains.", "no call"),
        ("tools", "weather", call("get_rain", {}), "get_rain: there is no such tool"),
        ("tools", "weather", call("get_weather", {"city": "Porto"}), 'get_weather: "unit" is a required property'),
        ("tools", "weather", call("get_weather", {"city": "Porto", "unit": "kelvin"}), "is not one of"),
        ("tools", "weather", call("get_weather", {"city": "Po", "unit": "celsius"})[:40], "get_weather: no JSON"),
        ("tools", "no arguments", call("get_time", {"zone": 1}), "get_time: Additional properties are not allowed"),
        ("tools", "no arguments", call("get_time", {}) + "\n" + call("get_place", {}), "get_place: there is no"),
        ("code", "add", "    return a - b", "AssertionError"),
        ("code", "add", "    return a + b\nimport sys\nsys.exit()", "it ended itself with exit code 0"),
    ],
)
def test_what_fails_says_why(category: str, name: str, text: str, reason: str, judge: Judge) -> None:
    (task,) = (task for task in TASKS[category] if task.id == name)
    assert reason in task.failure(text, judge)


def test_json_and_calls_are_asked_for_as_constraints(judge: Judge) -> None:
    (person, *_), (weather, *_), (copy, *_) = TASKS["json"], TASKS["tools"], TASKS["exact"]
    constraint = person.params(judge)["structured_outputs"]
    assert constraint.kind == "json_schema" and json.loads(constraint.text)["required"] == ["name", "age", "city"]
    assert weather.params(judge)["structured_outputs"].kind == "grammar"
    assert copy.params(judge) == {"stop": ("\n",)}


def test_models_with_templates_are_asked_in_chats() -> None:
    (weather, *_) = TASKS["tools"]
    raw = weather.asked(Judge(Tokenizer(), None)).text
    assert isinstance(raw, str) and "get_weather" in raw and raw.endswith("What is the weather in Porto?\n")
    plain = Judge(Tokenizer(chat_template="{{ messages }}"), None)
    knowing = Judge(Tokenizer(chat_template=TEMPLATE), None)
    assert not plain.tells_tools and knowing.tells_tools and knowing.format.name == "hermes"
    asked = (json.loads(bytes(weather.asked(judge).text)) for judge in (plain, knowing))  # type: ignore[arg-type]
    (messages, tools), (own_messages, own_tools) = asked
    assert tools is None and "get_weather" in messages[0]["content"]
    assert own_messages == [{"role": "user", "content": "What is the weather in Porto?"}]
    assert own_tools[0]["function"]["name"] == "get_weather"


def test_without_a_validator_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    with pytest.raises(InputError, match=r"^jsonschema-rs: .* pip install 'pilotfish\[eval\]'$"):
        validator()


# -- HumanEval's file


def test_rows_in_both_layouts(tmp_path: Path, judge: Judge) -> None:
    turns = {"id": "b", "turns": [PROBLEM["prompt"]], "test": PROBLEM["test"], "entry_point": "two"}
    tasks = humaneval_tasks(write_rows(tmp_path / "rows.jsonl", {"task_id": "a", **PROBLEM}, "", turns))
    assert [task.id for task in tasks] == ["a", "b"] and {task.prompt for task in tasks} == {PROBLEM["prompt"]}
    for task in tasks:
        assert isinstance(task, CodeTask) and "\ndef" in task.params(judge)["stop"]
        assert task.failure("    return 2\n", judge) == ""
        assert task.failure("    return 3\n", judge) == "AssertionError"
        assert task.failure("    return 2\n\nimport os\nos._exit(0)\n", judge) == "it ended itself with exit code 0"
        assert task.failure("    return 2\n\ndef check(f):\n    pass\n\ntwo = None", judge).startswith("TypeError")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"rows.jsonl:2: a row has task_id, prompt, test and entry_point"),
        ("[]", r"rows.jsonl:2: a row has"),
        ({"task_id": "b", "prompt": "x", "test": "y"}, r"rows.jsonl:2: .*KeyError\('entry_point'\)"),
        ({"task_id": 5, **PROBLEM}, r"rows.jsonl:2: .* are texts that are not empty"),
        ({"task_id": "b", **PROBLEM, "test": ""}, r"rows.jsonl:2: .* are texts that are not empty"),
        ({"id": "b", "turns": 7, "test": "x", "entry_point": "y"}, r"rows.jsonl:2: a row has"),
    ],
)
def test_rows_that_are_none(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(PromptError, match=rf"\A.*{message}.*\Z"):
        humaneval_tasks(write_rows(tmp_path / "rows.jsonl", {"task_id": "a", **PROBLEM}, row))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^humaneval: .* cannot be read"):
        humaneval_tasks(tmp_path / "none")
    with pytest.raises(InputError, match=r"^humaneval: .* has no rows"):
        humaneval_tasks(write_rows(tmp_path / "rows.jsonl", ""))
