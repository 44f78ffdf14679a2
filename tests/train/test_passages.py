"""Data of a user's own: every field that a line may have, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import InputError
from pilotfish.train.recipes import TaughtRecipe
from pilotfish.train.text.passages import Passages, passages_of


def read(lines: list[dict[str, Any]], tokenizer: Any, folder: Path) -> tuple[Passages, Passages]:
    path = folder / "data.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    return passages_of(TaughtRecipe(target=folder, data=(path,)), tokenizer)


def whole(passages: tuple[Passages, Passages], tokenizer: Any) -> list[str]:
    return sorted(text for part in passages for text in tokenizer.decode(part.text).split("<|endoftext|>") if text)


def open_ones(passages: tuple[Passages, Passages], tokenizer: Any) -> list[str]:
    return sorted(tokenizer.decode(prompt) for part in passages for prompt in part.prompts)


def test_every_field(tokenizer: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    lines: list[dict[str, Any]] = [
        {"text": "x = 1", "id": 7},
        {"tokens": tokenizer.encode("y = 2")},
        {"prompt": "def f", "response": "(x)"},
        {"messages": [*chat, {"role": "assistant", "content": "d"}]},
        {"conversations": chat[:2]},
        {"prompt": "import"},
        {"turns": ["one", "two"]},
        {"messages": chat},
    ]
    passages = read(lines, tokenizer, tmp_path)
    assert whole(passages, tokenizer) == ["a\nb\ncd", "ab", "def f(x)", "x = 1", "y = 2"]
    assert open_ones(passages, tokenizer) == ["a\nb\nc", "import", "one\ntwo"]


def test_a_twentieth_is_held_out_whatever_the_file_is_called(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "email").mkdir()
    training, held_out = read([{"text": f"x = {n}"} for n in range(40)], tokenizer, tmp_path / "email")
    assert [(part.text == 0).sum() for part in (training, held_out)] == [38, 2]


def test_sources_go_beside_data(tokenizer: Any, sources: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "def a"}\n{"prompt": "def b"}\n')
    recipe = TaughtRecipe(target=tmp_path, data=(tmp_path / "data.jsonl",), sources=(sources,), held_out=("beta",))
    training, held_out = passages_of(recipe, tokenizer)
    assert len(training.prompts) == len(held_out.prompts) == 1
    assert "alpha_0_0" in tokenizer.decode(training.text) and "beta" in tokenizer.decode(held_out.text)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "data.jsonl:2: "),
        ("[]", "object"),
        ('{"id": 3}', "one of text, tokens"),
        ('{"text": "a", "prompt": "b"}', "['text', 'prompt']"),
        ('{"text": 3}', "$.text"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"tokens": [5, 999]}', "999 is not allowed; expected ids below"),
    ],
)
def test_what_is_no_line_of_data_is_refused(line: str, told: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(InputError) as refused:
        passages_of(TaughtRecipe(target=tmp_path, data=(path,)), tokenizer)
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_data_without_text_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for text, told in ((None, "data.jsonl"), ("", "no text"), ('{"text": ""}', "no text"), ('{"text": "a"}', "two")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(InputError, match=told):
            passages_of(TaughtRecipe(target=tmp_path, data=(path,)), tokenizer)
