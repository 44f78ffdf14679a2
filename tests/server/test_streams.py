"""Streams: their bytes, what breaks them before and after the first token, and clients that go away."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from http_double import (
    CHAT,
    COMPLETIONS,
    USER,
    Answer,
    Client,
    Engine,
    Server,
    Submitted,
    Update,
    application,
    deltas,
    exchange,
    leave,
    saying,
)

from pilotfish.errors import EngineError, InputError, ParameterError, TargetUnavailable
from pilotfish.wire.serving import Delta, Finish


def test_a_stream_of_a_completion_byte_by_byte(client: Client) -> None:
    answer = client.post(COMPLETIONS, {"prompt": "def", "stream": True})
    first = answer.events[0]
    head = f'{{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"tiny",'
    head += f'"system_fingerprint":"{first["system_fingerprint"]}","choices":[{{"index":0,"text":'
    assert answer.body.decode() == (
        f'data: {head}"imp","logprobs":null,"finish_reason":null,"stop_reason":null}}],"seed":100}}\n\n'
        f'data: {head}"ort","logprobs":null,"finish_reason":null,"stop_reason":null}}]}}\n\n'
        f'data: {head}" os","logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.ended and answer.headers["cache-control"] == "no-cache"


def test_a_stream_of_a_chat(client: Client) -> None:
    fields = {"messages": [USER], "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, closing = client.post(CHAT, fields).events
    for index, text in enumerate(("import os", "return x")):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[0]["seed"] == 100 + index
        assert "".join(choice["delta"]["content"] for choice in own) == text
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert closing["choices"] == [] and closing["usage"]["completion_tokens"] == 11
    assert len({chunk["id"] for chunk in (*chunks, closing)}) == 1


def test_usage_with_every_chunk(client: Client) -> None:
    options = {"continuous_usage_stats": True}
    events = client.post(COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": options}).events
    assert [event["usage"]["completion_tokens"] for event in events] == [2, 4, 6]


def test_nothing_is_sent_for_half_a_character(client: Client, engine: Engine) -> None:
    engine.script = saying(engine.tokenizer, "a☯b☯", at_a_time=1)
    quiet = client.post(COMPLETIONS, {"prompt": "x", "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in quiet) == "a☯b☯"
    assert all(event["choices"][0]["text"] for event in quiet[:-1])
    loud = client.post(COMPLETIONS, {"prompt": "x", "stream": True, "speculation": {"detail": True}}).events
    assert len(loud) > len(quiet)


def test_details_of_speculation(client: Client) -> None:
    speculation = {"detail": True, "metrics": "summary"}
    events = client.post(COMPLETIONS, {"prompt": "x", "stream": True, "speculation": speculation}).events
    detail = events[1]["pilotfish"]
    assert detail["ends"] == [5, 6] and len(detail["tokens"]) == 2
    assert detail["verified"] == [{"at": 1.0, "tokens": 2, "nodes": 3, "accepted": 1, "origins": ["lm"]}]
    assert detail["steps"][0]["forward"] == 0.002 and detail["steps"][0]["pushes"] == []
    assert detail["steps"][0]["verified"] == 1.006
    assert [bool(event.get("metrics")) for event in events] == [False, False, True]  # the last one has them
    fields = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "speculation": speculation}
    events = client.post(COMPLETIONS, fields).events
    assert ["metrics" in event for event in events] == [False, False, False, True]


# -- errors

ERRORS = [
    (TargetUnavailable("target: was ended by signal 9"), 503, "service_unavailable"),
    (EngineError("a step broke"), 500, "internal_error"),
    (ParameterError("top_k", 9, "less"), 400, "invalid_request_error"),
    (InputError("prompt: too long"), 400, "invalid_request_error"),
    (KeyError("secret"), 500, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
def test_an_error_before_the_first_token(
    client: Client, engine: Engine, stream: bool, error: Exception, status: int, kind: str
) -> None:
    engine.script = lambda _: [error]
    answer = client.post(CHAT, {"messages": [USER], "stream": stream})
    assert (answer.status, answer.error["type"]) == (status, kind)
    assert "secret" not in answer.error["message"] and engine.submitted[0].aborted


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
def test_a_later_error(client: Client, engine: Engine, prompts: int, error: Exception, status: int, kind: str) -> None:
    said = engine.script
    engine.script = lambda submitted: [next(iter(said(submitted))), error]
    answer = client.post(COMPLETIONS, {"prompt": ["x"] * prompts, "stream": True})
    assert answer.status == 200 and answer.ended
    *before, last = answer.events
    assert last["error"]["type"] == kind and before and all("choices" in event for event in before)
    assert all(submitted.aborted for submitted in engine.submitted)
    assert client.post(COMPLETIONS, {"prompt": ["x"] * prompts}).status == status


def test_an_error_of_the_submission(client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise TargetUnavailable("target: gone")

    monkeypatch.setattr(engine, "submit", failing)
    assert client.post(COMPLETIONS, {"prompt": ["x", "y"]}).status == 503


def first_then_wait(engine: Engine) -> None:
    """Each stream gives one update, then nothing, for ever."""
    said = saying(engine.tokenizer, "import os")
    engine.script = lambda submitted: [next(iter(said(submitted))), asyncio.Event()]


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_deadline(client: Client, engine: Engine, prompt: Any) -> None:
    first_then_wait(engine)
    late = client.post(COMPLETIONS, {"prompt": prompt, "timeout": 0.05})
    assert (late.status, late.error["type"], late.error["param"]) == (504, "timeout", "timeout")
    events = client.post(COMPLETIONS, {"prompt": prompt, "timeout": 0.05, "stream": True}).events
    assert events[-1]["error"]["type"] == "timeout" and len(events) > 1
    assert all(submitted.aborted for submitted in engine.submitted)


def test_the_servers_deadline(serve: Callable[..., Client], engine: Engine) -> None:
    engine.script = lambda _: [asyncio.Event()]
    assert serve(request_timeout=0.05).post(COMPLETIONS, {"prompt": "x", "timeout": 60, "stream": True}).status == 504


# -- clients


ABORTED = 'vllm:request_success_total{engine="0",finished_reason="abort"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_client_that_goes_away(engine: Engine, stream: bool, prompt: Any) -> None:
    first_then_wait(engine)
    server = Server(engine)
    asyncio.run(leave(server.app, COMPLETIONS, {"prompt": prompt, "stream": stream}))
    assert all(submitted.aborted for submitted in engine.submitted) and server.admission.requests == 0
    ends = server.samples("vllm:request_success_total")
    assert [name for name, count in ends.items() if count] == [ABORTED]


def test_a_slow_reader_pulls_no_more_than_it_reads(engine: Engine) -> None:
    """The engine's Stream joins the updates that wait."""
    pulled: list[int] = []
    said = engine.script

    def script(submitted: Submitted) -> Any:
        for i, update in enumerate(said(submitted)):
            pulled.append(i)
            yield update

    engine.script = script
    seen: list[int] = []

    async def slow(answer: Answer) -> None:  # noqa: ARG001
        await asyncio.sleep(0.01)
        seen.append(len(pulled))

    body = json.dumps({"prompt": "x", "stream": True}).encode()
    asyncio.run(exchange(application(engine), "POST", COMPLETIONS, body, {}, on_part=slow))
    assert seen[:3] == [1, 2, 3]


def test_a_merged_update_is_one_chunk(client: Client, engine: Engine) -> None:
    def script(submitted: Submitted) -> list[Update]:
        one, two, three = deltas(engine.tokenizer, 0, "import os", submitted, Finish("stop", None), 2)
        both = Delta(
            1, 0, one.tokens + two.tokens, one.text + two.text, one.ends + two.ends, one.verified + two.verified
        )
        return [Update(both), Update(three)]

    engine.script = script
    speculation = {"metrics": "detailed"}
    events = client.post(COMPLETIONS, {"prompt": "x", "stream": True, "speculation": speculation}).events
    assert [event["choices"][0]["text"] for event in events] == ["import", " os"]
    assert events[-1]["metrics"]["speculative_decoding"]["per_step_drafted"] == [3, 3, 3]
