"""Keys and limits of requests, the middleware around them, and what both say in logs, metrics and traces."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from http_double import COMPLETIONS, Answer, Engine, Server, application, exchange
from openapi_document import OPERATIONS
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pilotfish.config.server import ServerConfig
from pilotfish.errors import EngineError, TargetUnavailable
from pilotfish.logs import configure
from pilotfish.server.auth import load_keyring
from pilotfish.server.observe.tracing import Tracer

SECRET = "a-secret-of-sixteen"
FILE = f"""
[[key]]
name = "search"
secret = "{SECRET}"
cache_salt = "search-only"
requests_per_minute = 2
max_concurrency = 1
"""


@pytest.fixture
def server(engine: Engine) -> Server:
    return Server(engine)


@pytest.fixture
def keyed(engine: Engine, tmp_path: Any) -> Server:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return Server(engine, keys=load_keyring(file=path))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    caplog.set_level(logging.INFO, "pilotfish.access")
    return lambda: [vars(record)["fields"] for record in caplog.records if record.name == "pilotfish.access"]


def test_without_a_known_key_nobody_comes_in(keyed: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for headers in ({}, {"authorization": "Bearer wrong-secret-of-sixteen"}, {"authorization": SECRET}):
        answer = keyed.client.post(COMPLETIONS, {"prompt": "x"}, **headers)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key" and SECRET not in answer.error["message"]
        assert keyed.client.get("/v1/models", **headers).status == 401
    assert not keyed.engine.submitted
    assert keyed.sample('pilotfish_requests_rejected_total{code="401",model_name="tiny"}') == 3
    logged = str([vars(record) for record in caplog.records])
    assert "401" in logged and SECRET not in logged and "wrong-secret" not in logged


@pytest.mark.parametrize("name", [name for name, each in OPERATIONS.items() if 401 in each.failures])
def test_every_path_asks_for_a_key_before_it_reads(keyed: Server, name: str) -> None:
    path = OPERATIONS[name].path.replace("{name}", "tiny")
    post = OPERATIONS[name].method == "post"
    answer = keyed.client.post(path, raw=b"no JSON") if post else keyed.client.get(path)
    assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error")


def test_a_key_in_the_header_of_anthropics_clients(keyed: Server) -> None:
    wrong = "wrong-secret-of-sixteen"
    assert keyed.client.get("/v1/models", x_api_key=SECRET).status == 200
    assert keyed.client.get("/v1/models", x_api_key=SECRET, authorization="Basic eA==").status == 200
    assert keyed.client.get("/v1/models", x_api_key=wrong, authorization=f"Bearer {SECRET}").status == 200
    assert keyed.client.get("/v1/models", x_api_key=SECRET, authorization=f"Bearer {wrong}").status == 401
    assert keyed.client.get("/v1/models", x_api_key=wrong).status == 401
    assert keyed.client.get("/v1/models", x_api_key="").status == 401


def test_a_key_brings_its_salt_and_its_rate(keyed: Server) -> None:
    key = {"authorization": f"Bearer {SECRET}"}
    own = keyed.client.post(COMPLETIONS, {"prompt": "x", "cache_salt": "mine"}, **key)
    assert own.status == 400 and own.error["param"] == "cache_salt"
    answers = [keyed.client.post(COMPLETIONS, {"prompt": "x"}, **key) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[2].error["code"] == "rate_limit_exceeded" and int(answers[2].headers["retry-after"]) >= 1
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    for header, status, kind in ((key, 429, "rate_limit_error"), ({}, 401, "authentication_error")):
        answer = keyed.client.post("/v1/messages", body, **header)
        assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    assert [submitted.cache_salt for submitted in keyed.engine.submitted] == ["search-only"] * 2


def test_a_key_has_so_many_requests_at_a_time(keyed: Server) -> None:
    body, key, said = {"prompt": "x", "stream": True}, {"authorization": f"Bearer {SECRET}"}, keyed.engine.script
    keyed.engine.script = lambda submitted: [next(iter(said(submitted))), asyncio.Event()]
    refused, gone = list[Answer](), asyncio.Event()

    async def meanwhile(_: Answer) -> None:
        keyed.engine.script = said
        refused.append(await exchange(keyed.app, "POST", COMPLETIONS, json.dumps(body).encode(), key))
        gone.set()

    asyncio.run(exchange(keyed.app, "POST", COMPLETIONS, json.dumps(body).encode(), key, gone, meanwhile))
    (second,) = refused
    assert (second.status, second.error["code"]) == (429, "concurrency_exceeded")
    assert second.error["type"] == "rate_limit_error"
    assert second.error["message"].startswith("max_concurrency: 1 ") and 1 <= int(second.headers["retry-after"]) <= 60
    assert keyed.client.post(COMPLETIONS, body, **key).status == 200  # the first one has left


@pytest.mark.parametrize(("limit", "status"), [(1 + 6 + 1 + 30, 200), (36, 429)])
def test_a_request_is_settled_to_the_tokens_it_used(engine: Engine, tmp_path: Any, limit: int, status: int) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "few"\nsecret = "{SECRET}"\ntokens_per_minute = {limit}\n')
    path.chmod(0o600)
    client = Server(engine, keys=load_keyring(file=path)).client
    body, key = {"prompt": [5], "max_tokens": 30}, {"authorization": f"Bearer {SECRET}"}
    usage = client.post(COMPLETIONS, body, **key).json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 6)
    assert client.post(COMPLETIONS, body, **key).status == status


def test_a_full_queue(engine: Engine) -> None:
    server = Server(engine, config=ServerConfig(max_queued_requests=0))
    admit = server.admission.admit
    held = []

    def hold(*arguments: Any) -> Any:
        held.append(admit(*arguments))
        return admit(*arguments)

    server.admission.admit = hold  # type: ignore[method-assign]
    refused = server.client.post(COMPLETIONS, {"prompt": "x", "n": 8})
    assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "queue_full", "rate_limit_error")
    assert "max_queued_requests" in refused.error["message"] and 1 <= int(refused.headers["retry-after"]) <= 60
    held[0].release(0)
    server.admission.admit = admit  # type: ignore[method-assign]
    assert server.client.post(COMPLETIONS, {"prompt": "x", "n": 8}).status == 200
    assert server.admission.sequences == 0


def test_the_access_line_of_a_refusal_says_why(server: Server, lines: Callable[[], list[dict[str, Any]]]) -> None:
    server.client.post(COMPLETIONS, {"prompt": "x", "temperature": -1})
    server.client.post(COMPLETIONS, {"prompt": [1, "secret"]})
    server.client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": 7, "name": "secret"}]})
    temperature, prompt, chat = lines()
    assert (temperature["status"], temperature["param"]) == (400, "temperature")
    assert temperature["error"].startswith("temperature: -1")
    assert (prompt["status"], prompt["param"], chat["status"]) == (400, "prompt", 400)
    assert chat["param"].startswith("messages") and "secret" not in str((prompt, chat)) and "error" not in prompt


@pytest.mark.parametrize(
    "body",
    [
        *('"secret"', '{"suffix": "secret", "prompt": "x"}', '{"documents": ["secret"], "prompt": "x"}'),
        *('{"grammar": "root ::= secret", "prompt": "x"}', '{"options": {"stop": "secret"}, "prompt": "x"}'),
        '{"response_format": {"type": "secret"}, "prompt": "x"}',
        *('{"structured_outputs": {"json": "secret"}, "prompt": "x"}', '{"guided_choice": "secret", "prompt": "x"}'),
    ],
)
def test_an_access_line_quotes_no_prompt(server: Server, lines: Callable[[], list[dict[str, Any]]], body: str) -> None:
    answer = server.client.post(COMPLETIONS, raw=body.encode())
    (line,) = lines()
    assert answer.status == 400 and line["param"] == answer.error["param"] and "secret" not in str(line)


def test_the_access_line_of_a_broken_stream_says_why(server: Server, lines: Callable[[], list[dict[str, Any]]]) -> None:
    said = server.engine.script
    server.engine.script = lambda submitted: [next(iter(said(submitted))), TargetUnavailable("target: it ended", 1.0)]
    server.client.post(COMPLETIONS, {"prompt": "x", "stream": True})
    (line,) = lines()
    assert (line["status"], line["finish_reason"], line["error"]) == (200, "error", "target: it ended")


def test_a_server_that_drains(server: Server) -> None:
    server.admission.closed = True
    answer = server.client.post(COMPLETIONS, {"prompt": "x"})
    assert answer.status == 503 and answer.error["code"] == "draining" and "retry-after" in answer.headers
    ready = server.client.get("/ready")
    assert ready.status == 503 and ready.json["reason"].startswith("draining")
    assert server.client.get("/health").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_counted_of_a_request(server: Server, stream: bool) -> None:
    fields = {"prompt": ["ab", "cd"], "n": 2, "stream": stream, "max_tokens": 20, "metadata": {"tag": "batch"}}
    assert server.client.post(COMPLETIONS, fields).status == 200
    labels = 'mode="sync",model_name="tiny",output="completion",tag="batch"'
    assert server.sample(f'pilotfish_requests_total{{finished_reason="stop",{labels}}}') == 1
    tokens = len(server.engine.tokenizer.encode("import os")) + len(server.engine.tokenizer.encode("return x"))
    assert server.sample(f'pilotfish_request_tokens_total{{kind="generation",{labels}}}') == 2 * tokens
    assert server.sample('pilotfish_requests_in_flight{model_name="tiny"}') == 0
    assert server.admission.sequences == server.admission.slots == 0
    assert server.sample('http_requests_total{handler="/v1/completions",method="POST",status="2xx"}') == 1


def test_the_mode_of_a_request_that_does_without_speculation(server: Server) -> None:
    server.client.post(COMPLETIONS, {"prompt": "ab", "speculation": {"mode": "off"}}, x_request_tag="plain")
    labels = 'mode="off",model_name="tiny",output="completion",tag="plain"'
    assert server.sample(f'pilotfish_requests_total{{finished_reason="stop",{labels}}}') == 1


@pytest.mark.parametrize("headers", [{"x_request_tag": "no spaces allowed"}, {"x_request_tag": "x" * 65}])
def test_a_tag_that_is_none(server: Server, headers: dict[str, str]) -> None:
    answer = server.client.post(COMPLETIONS, {"prompt": "ab"}, **headers)
    assert answer.status == 400 and answer.error["param"] == "x-request-tag"
    answer = server.client.post(COMPLETIONS, {"prompt": "ab", "metadata": {"tag": 7}})
    assert answer.status == 400 and answer.error["param"] == "metadata.tag"
    assert server.admission.requests == 0


def test_a_request_that_breaks_is_an_error_and_leaves_nothing(server: Server) -> None:
    server.engine.script = lambda _: [EngineError("step failed: it burns")]
    assert server.client.post(COMPLETIONS, {"prompt": "ab"}).status == 500
    labels = 'mode="sync",model_name="tiny",output="completion",tag="none"'
    assert server.sample(f'pilotfish_requests_total{{finished_reason="error",{labels}}}') == 1
    assert server.admission.requests == server.admission.sequences == 0 and server.admission.idle.is_set()


def test_a_line_in_the_log_for_each_request(server: Server, lines: Callable[[], list[dict[str, Any]]]) -> None:
    server.client.post(COMPLETIONS, {"prompt": "abc"}, x_request_id="r-1")
    server.client.get("/health")
    server.client.get("/nowhere")
    first, second = lines()
    assert (first["status"], first["path"], first["finish_reason"]) == (200, COMPLETIONS, "stop")
    assert first["generation_tokens"] > 0 and first["prompt_tokens"] > 0 and first["ms"] > 0
    assert (second["status"], second["path"]) == (404, "/nowhere") and "prompt_tokens" not in second


def test_whoever_announces_the_servers_start_and_end_is_answered(engine: Engine) -> None:
    """Ray Serve does; uvicorn is told not to."""
    told, answers = iter(["lifespan.startup", "lifespan.shutdown"]), []

    async def receive() -> Any:
        return {"type": next(told)}

    async def send(message: Any) -> None:
        answers.append(message["type"])

    asyncio.run(application(engine)({"type": "lifespan", "state": {}}, receive, send))
    assert answers == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_paths_that_clients_make_up_are_no_labels(server: Server) -> None:
    server.client.get("/made/up")
    assert server.sample('http_requests_total{handler="other",method="GET",status="4xx"}') == 1


def test_prompts_are_logged_where_that_is_asked_for(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (True, False):
        configure("json", prompts=asked)
        server.client.post(COMPLETIONS, {"prompt": "the secret plan"})
        assert ("the secret plan" in capsys.readouterr().err) is asked


def test_a_request_is_a_span(engine: Engine) -> None:
    tracer = Tracer(exporter := InMemorySpanExporter(), "tiny")
    server = Server(engine, tracer=tracer)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert server.client.post(COMPLETIONS, {"prompt": "ab"}, traceparent=parent).status == 200
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert span.context is not None and f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes is not None and span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert [event.name for event in span.events] == ["verify"] * 3
