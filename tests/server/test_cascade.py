"""A cascade: who answers, what is told of it, and how it ends."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cascade_double import LARGE, SMALL, CascadeServer, cascaded
from http_double import CHAT, COMPLETIONS, IDENTITY, Health, Submitted, Update, leave, saying
from support import write_tokenizer
from transformers import AutoTokenizer

from pilotfish.errors import EngineError, ModelError, PromptError, TargetUnavailable


@pytest.fixture
def server(tokenizer: Any, tmp_path: Path) -> Iterator[CascadeServer]:
    made = cascaded(tokenizer, tmp_path)
    yield made
    made.capture.close()
    assert made.admission.requests == 0


def test_the_small_model_answers_what_it_is_sure_of(server: CascadeServer) -> None:
    answer = server.ask()
    assert answer.json["choices"][0]["text"] == "small talk of it" and answer.json["model"] == "auto"
    assert answer.json["pilotfish"] == {"answered_by": SMALL, "escalated": None, "confidence": -0.5}
    assert not server.large.submitted
    (asked,) = server.small.submitted
    assert (asked.params.logprobs, asked.max_nodes, asked.draft) == (0, None, "")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"metadata": {"tag": "hard"}}, "tag"), ({"prompt": [5] * 9}, "length"), ({"prompt": ["x", [5] * 9]}, "length")],
)
def test_a_rule_sends_a_request_to_the_large_model(server: CascadeServer, fields: dict[str, Any], reason: str) -> None:
    answer = server.ask(**fields).json
    assert answer["pilotfish"] == {"variant": "only", "answered_by": LARGE, "escalated": reason, "confidence": None}
    assert answer["choices"][0]["text"] == "large talk" and not server.small.submitted
    assert server.large.submitted[0].max_nodes == 4, "its variant holds"


def test_an_unsure_small_model_gives_way(server: CascadeServer) -> None:
    server.sure = [-0.9]
    answer = server.ask(seed=7, temperature=0.5, max_tokens=9).json
    said = {"variant": "only", "answered_by": LARGE, "escalated": "confidence"}
    assert answer["pilotfish"] == {**said, "confidence": pytest.approx(-0.9)}
    assert answer["choices"][0]["text"] == "large talk" and answer["usage"]["completion_tokens"] < 9
    (first,), (second,) = server.small.submitted, server.large.submitted
    assert first.aborted and second.params == replace(first.params, logprobs=None) and second.tokens == first.tokens


def test_only_the_first_tokens_count(server: CascadeServer) -> None:
    def script(submitted: Submitted) -> Iterator[Update]:
        for place, update in enumerate(server.saying("small talk of it")(submitted)):
            worse = [replace(one, logprob=-9.0) for one in update.delta.logprobs] if place >= 2 else None
            yield update if worse is None else Update(msgspec.structs.replace(update.delta, logprobs=worse))

    server.small.script = script
    assert server.told() == (SMALL, None)


@pytest.mark.parametrize("sure", [[-0.5], [-0.9]])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["x", "y"], "n": 2}, {"logprobs": 1}, {"echo": True}])
def test_a_stream_says_what_the_whole_says(server: CascadeServer, sure: list[float], fields: dict[str, Any]) -> None:
    server.sure = sure
    whole = server.ask(**fields).json
    events = server.ask(**fields, stream=True).events
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        assert (choice["logprobs"] is not None) == ("logprobs" in fields)
    assert events[-1]["pilotfish"] == whole["pilotfish"] and {event["model"] for event in events} == {"auto"}
    assert all("pilotfish" not in event for event in events[:-1])


def test_nothing_is_sent_before_it_is_decided(server: CascadeServer) -> None:
    """Then all that was held back comes at once, and each update after it."""
    texts = [event["choices"][0]["text"] for event in server.ask(stream=True).events]
    assert len(texts) > 2 and "".join(texts) == "small talk of it"
    first = server.small.tokenizer.encode(texts[0], add_special_tokens=False)
    assert len(first) == 4


def test_the_least_sure_output_decides(server: CascadeServer) -> None:
    server.sure = [-0.1, -0.9]
    assert server.told(n=2) == (LARGE, "confidence")
    server.sure = [-0.1, -0.7]
    answer = server.ask(n=2).json
    assert answer["pilotfish"]["answered_by"] == SMALL and answer["pilotfish"]["confidence"] == pytest.approx(-0.7)


def test_a_short_output_is_judged_by_what_it_has(server: CascadeServer) -> None:
    server.small.script = server.saying("x")
    assert server.told() == (SMALL, None)
    server.sure = [-0.9]
    assert server.told() == (LARGE, "confidence")


# -- a small model that cannot


def test_a_small_model_that_is_not_there_is_passed_over(server: CascadeServer) -> None:
    server.small.health = Health(ready=False, reason="target: it loads", identity=None)
    assert server.told() == (LARGE, "unavailable")


@pytest.mark.parametrize("error", [EngineError("broke"), TargetUnavailable("lost"), PromptError("too long")])
@pytest.mark.parametrize("after", [0, 1])
def test_one_that_fails_before_it_is_judged_is_passed_over(server: CascadeServer, error: Exception, after: int) -> None:
    server.small.script = server.broken(after, error)
    assert server.told() == (LARGE, "unavailable") and server.small.submitted[0].aborted


def test_one_that_fails_later_fails_the_request(server: CascadeServer) -> None:
    server.small.script = server.broken(3, EngineError("broke"))
    assert server.ask().status == 500 and not server.large.submitted
    assert "broke" in server.ask(stream=True).events[-1]["error"]["message"]


def test_without_the_large_model_what_the_small_one_is_unsure_of_fails(server: CascadeServer) -> None:
    server.large.health = replace(Health(), ready=False, reason="target: it loads")
    assert server.told() == (SMALL, None)
    server.sure = [-0.9]
    answer = server.ask()
    assert answer.status == 503 and server.small.submitted[-1].aborted


def test_a_small_context_takes_what_fits(server: CascadeServer) -> None:
    server.small.health = Health(identity=msgspec.structs.replace(IDENTITY, longest=8))
    assert server.told(prompt=[5, 6]) == (SMALL, None) and server.small.submitted[-1].params.max_tokens == 6
    assert server.told(prompt=[5, 6], max_tokens=7) == (LARGE, "length")
    assert server.told(prompt=[5, 6], min_tokens=7, max_tokens=None) == (LARGE, "length")
    assert server.told(prompt=[5] * 8) == (LARGE, "length")


# -- what is told, and to whom


def test_every_api_tells(server: CascadeServer) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    asked = {CHAT: chat, "/v1/messages": {**chat, "max_tokens": 9}, "/v1/responses": {"input": "x"}}
    server.cascade.policy = msgspec.structs.replace(server.cascade.policy, longest=None)
    for path, fields in asked.items():
        answer = server.ask(path, **fields)
        assert answer.status == 200, answer.body
        assert answer.json["pilotfish"]["answered_by"] == SMALL and answer.json["model"] == "auto"
        streamed = server.ask(path, **fields, stream=True).body.decode()
        assert streamed.count('"answered_by":"models/small"') == 1


def test_the_alias_is_listed_and_others_are_not_served(server: CascadeServer) -> None:
    names = [model["id"] for model in server.client.get("/v1/models").json["data"]]
    assert names == ["tiny", "auto"] and server.client.get("/v1/models/auto").status == 200
    assert server.client.get("/v1/models/small").status == 404
    refused = server.client.post(COMPLETIONS, {"model": "other", "prompt": "x"})
    assert refused.status == 404 and "tiny or auto" in refused.error["message"]
    assert server.client.get("/ready").status == 200


def test_the_models_own_name_asks_it_alone(server: CascadeServer) -> None:
    for fields in ({}, {"model": "tiny"}):
        answer = server.client.post(COMPLETIONS, {"prompt": "x", "metadata": {"tag": "hard"}, **fields}).json
        assert answer["model"] == "tiny" and answer["pilotfish"] == {"variant": "only"}
    assert not server.small.submitted
    own, alias = (server.ask(model=name).json["system_fingerprint"] for name in ("tiny", "auto"))
    assert own != alias


def test_what_is_counted(server: CascadeServer) -> None:
    server.ask()
    server.sure = [-0.9]
    server.ask(n=2)
    server.ask(metadata={"tag": "hard"})
    server.cascade.small.health = Health(ready=False)  # type: ignore[misc]
    server.ask()
    name, reasons = "pilotfish_cascade_requests_total", ("confidence", "tag", "unavailable")
    answered = [("small", "sure"), *(("large", reason) for reason in reasons)]
    told = {f'{name}{{answered_by="{side}",reason="{reason}"}}': 1.0 for side, reason in answered}
    assert server.samples(name) == told
    assert list(server.samples("pilotfish_cascade_surprisal_count").values()) == [2.0]
    assert list(server.samples("pilotfish_cascade_surprisal_sum").values()) == [pytest.approx(0.5 + 0.9)]
    modes = {name.split('mode="')[1].split('"')[0] for name in server.samples("pilotfish_requests_total")}
    assert modes == {"cascade"} and not server.samples("pilotfish_variant_requests_total")


def test_the_access_log_has_it(server: CascadeServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pilotfish.access"):
        server.ask(metadata={"tag": "hard"})
    (line,) = [record.fields for record in caplog.records if hasattr(record, "fields")]  # type: ignore[attr-defined]
    assert (line["answered_by"], line["escalated"]) == (LARGE, "tag")


def test_feedback_is_by_the_side_that_answered(server: CascadeServer) -> None:
    for sure in (-0.5, -0.9):
        server.sure = [sure]
        told = server.client.post("/v1/feedback", {"request_id": server.ask().json["id"], "success": True}).json
        assert told["mode"] == ("small" if sure == -0.5 else "large")


def test_rollout_canary_and_capture_know_nothing_of_it(server: CascadeServer) -> None:
    for sure in ([-0.5], [-0.9]):
        server.sure = sure
        assert server.ask(metadata={"tag": "learn"}).status == 200
    assert not server.offered and not any(arm.requests or arm.pinned for arm in server.rollout.arms.arms.values())
    assert not server.rollout.statistics().windows and not server.rollout._steps and not server.rollout._running
    assert not server.samples("pilotfish_captured_requests_total") and not server.samples("pilotfish_variant_steps")
    server.ask(model="tiny", metadata={"tag": "learn"})
    server.capture.close()
    assert len(server.offered) == 1 and server.rollout.arms.arms["only"].requests == 1 and server.rollout._steps
    assert sum(server.samples("pilotfish_captured_requests_total").values()) == 1


def test_a_variant_that_is_cut_speculates_no_more(server: CascadeServer) -> None:
    """Also for requests that escalate after that."""
    server.sure = [-0.9]
    said = server.saying("small talk of it")

    def script(submitted: Submitted) -> Iterable[Update]:
        for update in said(submitted):
            (guided,) = server.rollout._running
            guided.cut_short()
            yield update

    server.small.script = script
    assert server.told() == (LARGE, "confidence") and server.large.submitted[0].max_nodes == 0


def test_unequal_tokenizers_are_refused(server: CascadeServer, tmp_path: Path) -> None:
    async def started() -> None:
        """Nothing to start."""

    server.small.start = started  # type: ignore[attr-defined]
    asyncio.run(server.cascade.start())
    write_tokenizer(tmp_path / "other", 300)
    server.small.tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"^cascade\.small\.target: models/small reads prompts otherwise: token "):
        asyncio.run(server.cascade.start())
    added = AutoTokenizer.from_pretrained(server.large.tokenizer.name_or_path)
    added.add_tokens(["<tool>"])
    server.small.tokenizer = added
    with pytest.raises(ModelError, match="only one of them has the added token"):
        asyncio.run(server.cascade.start())


# -- clients that leave, or that wait for too long: nothing stays behind in either engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("of_small", "sure", "large"), [(0, -0.5, 0), (1, -0.5, 0), (3, -0.5, 0), (9, -0.9, 1)])
def test_a_gone_client_frees_both(server: CascadeServer, of_small: int, sure: float, large: int, stream: bool) -> None:
    """Before the small model says anything, before it is judged, after that, and while the large one answers."""
    server.sure = [sure]
    said = saying(server.large.tokenizer, "large talk")
    server.small.script = server.broken(of_small, asyncio.Event())
    server.large.script = lambda submitted: [next(iter(said(submitted))), asyncio.Event()]
    asyncio.run(leave(server.app, COMPLETIONS, {"model": "auto", "prompt": "x", "stream": stream}))
    submitted = [*server.small.submitted, *server.large.submitted]
    assert len(server.large.submitted) == large and all(one.aborted for one in submitted)
    assert server.admission.requests == 0
    assert sum(server.samples("pilotfish_cascade_requests_total").values()) == (of_small >= 3)
