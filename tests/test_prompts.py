"""What the engine is given for a row."""

from typing import Any

import pytest

from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import PromptError
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.prompts import Row, chat_prompt, marks_turns, prompt_of

TURNS = Row(1, ("one", "two"), chat=True, place="file:1")


class Tokenizer:
    """Just enough of one: a template that brackets each message, tokens that are code points."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        if self.chat_template == "broken":
            raise RuntimeError("roles must\nalternate")
        if self.chat_template == "joining":
            return "".join(m["content"] for m in messages)
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def test_turns_are_user_messages_of_the_chat_template() -> None:
    tokens = prompt_of(TURNS, Tokenizer("some"), raw=False)
    assert "".join(map(chr, tokens)) == "<user>one<user>two"


@pytest.mark.parametrize(("template", "raw"), [(None, False), ("some", True)])
def test_turns_are_joined_raw_otherwise(template: str | None, raw: bool) -> None:
    assert prompt_of(TURNS, Tokenizer(template), raw=raw) == "one\ntwo"


def test_a_prompt_is_always_raw() -> None:
    assert prompt_of(Row(1, ("one",), chat=False, place=""), Tokenizer("some"), raw=False) == "one"


def test_an_empty_turn_is_refused_whatever_the_template_adds() -> None:
    with pytest.raises(PromptError, match="turns"):
        prompt_of(Row(1, ("one", ""), chat=True, place=""), Tokenizer("some"), raw=False)


def test_a_template_that_raises_makes_a_bad_row() -> None:
    with pytest.raises(PromptError, match="chat template refuses"):
        prompt_of(TURNS, Tokenizer("broken"), raw=False)


def test_the_bundled_pair_knows_no_conversations() -> None:
    assert not marks_turns(load_tokenizer(resolve_pair("pycode").target))


def test_messages_need_a_template() -> None:
    with pytest.raises(PromptError, match=r"^messages: the model has no chat template; "):
        chat_prompt([{"role": "user", "content": "one"}], Tokenizer(None))


@pytest.mark.parametrize(("template", "marks"), [("some", True), ("broken", True), ("joining", False), (None, False)])
def test_a_template_that_only_joins_marks_no_turns(template: str | None, marks: bool) -> None:
    assert marks_turns(Tokenizer(template)) is marks
