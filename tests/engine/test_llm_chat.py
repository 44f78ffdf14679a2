"""Conversations through the offline interface."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from support import assert_idle

from pilotfish import LLM, SamplingParams
from pilotfish.errors import InputError

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('it is\n forbidden') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)
P = SamplingParams(max_tokens=4, seed=3)
ASKED = [{"role": "system", "content": "brief"}, {"role": "user", "content": "one"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target = Path(shutil.copytree(llama, tmp_path_factory.mktemp("chat") / "tiny"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(target, dtype="float32", threads=1, kv_slots=1024)


def given(llm: LLM, messages: Any, **options: Any) -> str:
    """The text that the model continues."""
    (output,) = llm.chat(messages, P, **options)
    return str(llm.engine.tokenizer.decode(output.prompt_token_ids))


def test_a_conversation_goes_through_the_template(llm: LLM) -> None:
    (chatted,) = llm.chat(ASKED, P)
    (same,) = llm.generate("<system>brief<user>one<assistant>", P)
    assert chatted.prompt_token_ids == same.prompt_token_ids
    assert chatted.outputs[0].token_ids == same.outputs[0].token_ids and len(chatted.outputs) == 1


def test_several_conversations_have_an_output_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, seed=n) for n in (1, 2)]
    outputs = llm.chat([ASKED, ({"role": "user", "content": "two"},)], each)
    texts = [llm.engine.tokenizer.decode(output.prompt_token_ids) for output in outputs]
    assert texts == ["<system>brief<user>one<assistant>", "<user>two<assistant>"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert llm.chat([]) == []


def test_options_reach_the_template(llm: LLM) -> None:
    half = [*ASKED, {"role": "assistant", "content": "It is"}]
    whole = "<system>brief<user>one<assistant>It is"
    assert given(llm, half, continue_final_message=True) == whole
    assert given(llm, half, add_generation_prompt=False, continue_final_message=True) == whole
    assert given(llm, half, add_generation_prompt=False) == whole
    assert given(llm, half) == f"{whole}<assistant>"
    assert given(llm, ASKED[1:], chat_template_kwargs={"mood": "glad"}) == "<user>one<assistant>glad"
    assert given(llm, ASKED[1:], chat_template="{{ messages[0].content }}!") == "one!"


def test_messages_are_those_of_the_server(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "assistant", "tool_calls": [CALL]}]
    messages += [{"role": "tool", "content": "2", "tool_call_id": "c"}]
    assert given(llm, messages, tools=[TOOL]) == '[f]<system>a\nb<assistant>{"x": 1}<tool>2<assistant>'


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("hello", {}, "messages: 'hello' is not allowed; expected a list"),
        ([[]], {}, "messages[0]: [] is not allowed; expected a list of at least one message"),
        (({"role": "user", "content": 3},), {}, "messages[0].content: 3 is not allowed; expected text or a list"),
        (
            [ASKED, [{"role": "bot", "content": "a"}]],
            {},
            "messages[1][0].role: 'bot' is not allowed; expected system, developer, user, assistant or tool",
        ),
        ([{"role": "user", "content": "refuse"}], {}, "messages: the chat template refuses them: it is forbidden"),
        (ASKED, {"tools": [{"type": "function"}]}, "tools[0].function: it is missing"),
        (
            ASKED,
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt: True is not allowed; expected false with continue_final_message",
        ),
        (
            ASKED,
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs: 'tokenize' is not allowed; expected names that only the chat template gives a "
            "meaning to",
        ),
        (ASKED, {"chat_template": "{% if %}"}, "chat_template: it is no Jinja template: line 1: "),
    ],
)
def test_errors_are_named_before_anything_runs(llm: LLM, messages: Any, options: dict[str, Any], message: str) -> None:
    assert refused(InputError, llm.chat, messages, P, **options).startswith(message)
    assert_idle(llm.engine)


def test_a_model_without_a_template_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", None)
    with pytest.raises(InputError, match=r"^messages: the model has no chat template; give it one, or continue a text"):
        llm.chat(ASKED, P)
    assert given(llm, ASKED, chat_template="{{ messages[1].content }}!") == "one!"
