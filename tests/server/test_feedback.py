"""Feedback: for one's own requests, once each, and what it adds to the table and the metrics."""

import logging
from typing import Any

import pytest
from http_double import CHAT, Answer, Engine, Server

from pilotfish.logs import configure
from pilotfish.server.auth import load_keyring
from pilotfish.server.observe import feedback
from pilotfish.server.observe.metrics import MAX_TAGS

FEEDBACK = "/v1/feedback"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ONE, TWO = "secret-number-one", "secret-number-two"


class FeedbackServer(Server):
    def tell(self, **fields: Any) -> Answer:
        return self.client.post(FEEDBACK, fields, **self.headers)

    def table(self) -> list[dict[str, Any]]:
        answer = self.client.get(FEEDBACK, **self.headers).json
        assert answer["object"] == "list"
        rows: list[dict[str, Any]] = answer["data"]
        return rows


def callers(engine: Engine) -> tuple[FeedbackServer, FeedbackServer]:
    """One server as two callers have it."""
    keys = load_keyring([ONE, TWO])
    one, two = (FeedbackServer(engine, keys, headers={"authorization": f"Bearer {key}"}) for key in (ONE, TWO))
    two.client, two.metrics = one.client, one.metrics
    return one, two


@pytest.fixture
def server(engine: Engine) -> FeedbackServer:
    return FeedbackServer(engine)


def test_feedback_by_either_id(server: FeedbackServer) -> None:
    chat, post = {"messages": [{"role": "user", "content": "hi"}]}, server.client.post
    message = post(MESSAGES, {"model": "tiny", "max_tokens": 9, **chat})
    others = (post(CHAT, chat), message, post(RESPONSES, {"input": "hi"}))
    for answer in (server.ask(), server.ask(request_id="mine"), *others):
        assert answer.status == 200
        for request_id in (answer.json["id"], answer.headers["x-request-id"]):
            told = server.tell(request_id=request_id, success=True)
            if request_id == answer.json["id"]:
                row = {"category": "none", "mode": "sync", "success": True, "score": 1.0}
                assert told.status == 200 and told.json == {"object": "feedback", "request_id": request_id, **row}
            else:
                assert told.status == 409 and told.error["code"] == "feedback_given"
    (row,) = server.table()
    assert (row["requests"], row["successes"]) == (5, 5)


def test_feedback_for_a_stream(server: FeedbackServer) -> None:
    answer = server.ask(stream=True)
    assert server.tell(request_id=answer.events[0]["id"], score=0.25).json["success"] is False
    assert server.table()[0]["mean_score"] == 0.25 and server.table()[0]["success_rate"] == 0


def test_the_table_has_rows_by_category_and_mode(server: FeedbackServer) -> None:
    def asked(**fields: Any) -> str:
        return str(server.ask(**fields).json["id"])

    off = {"speculation": {"mode": "off"}}
    assert server.tell(request_id=asked(metadata={"tag": "code"}), success=True).json["category"] == "code"
    assert server.tell(request_id=asked(metadata={"tag": "code"}), score=0.5).json["success"] is True
    assert server.tell(request_id=asked(metadata={"tag": "code"}, **off), success=False).json["mode"] == "off"
    assert server.tell(request_id=asked(metadata={"tag": "code"}), success=False, category="json").status == 200
    steps = {"tokens_per_verify_step": 2.0}  # as the engine's script says
    sync = {"category": "code", "mode": "sync", "requests": 2, "successes": 2, "success_rate": 1, "mean_score": 0.75}
    off_row = {"category": "code", "mode": "off", "requests": 1, "successes": 0, "success_rate": 0, "mean_score": 0}
    json_row = {**off_row, "category": "json", "mode": "sync"}
    assert server.table() == [{**row, **steps} for row in (off_row, sync, json_row)]
    assert server.samples("pilotfish_feedback") == {
        'pilotfish_feedback_total{category="code",mode="sync",outcome="success"}': 2,
        'pilotfish_feedback_total{category="code",mode="off",outcome="failure"}': 1,
        'pilotfish_feedback_total{category="json",mode="sync",outcome="failure"}': 1,
        'pilotfish_feedback_score_total{category="code",mode="sync"}': 1.5,
        'pilotfish_feedback_score_total{category="code",mode="off"}': 0,
        'pilotfish_feedback_score_total{category="json",mode="sync"}': 0,
        'pilotfish_feedback_tokens_total{category="code",mode="sync"}': 12,
        'pilotfish_feedback_tokens_total{category="code",mode="off"}': 6,
        'pilotfish_feedback_tokens_total{category="json",mode="sync"}': 6,
        'pilotfish_feedback_steps_total{category="code",mode="sync"}': 6,
        'pilotfish_feedback_steps_total{category="code",mode="off"}': 3,
        'pilotfish_feedback_steps_total{category="json",mode="sync"}': 3,
    }


def test_nobody_tells_of_requests_of_others(engine: Engine) -> None:
    one, two = callers(engine)
    own = one.ask().json["id"]
    foreign = two.tell(request_id=own, success=True)
    unknown = two.tell(request_id="cmpl-" + "0" * 32, success=True)
    assert foreign.status == unknown.status == 404 and foreign.error["code"] == "request_not_found"
    assert foreign.error["message"].replace(own, "ID") == unknown.error["message"].replace("cmpl-" + "0" * 32, "ID")
    assert two.tell(request_id=own, success=True).status == 404  # not 409: nothing was told
    assert one.tell(request_id=own, success=True).status == 200
    assert two.tell(request_id=own, success=True).status == 404
    for answer in (one.client.post(FEEDBACK, {"request_id": own, "success": True}), one.client.get(FEEDBACK)):
        assert answer.status == 401 and answer.error["code"] == "invalid_api_key"


def test_callers_with_the_same_id_tell_of_their_own(engine: Engine) -> None:
    one, two = callers(engine)
    for server in (one, two):
        server.ask(request_id="same")
    assert [server.tell(request_id="cmpl-same", success=True).status for server in (one, two, one)] == [200, 200, 409]


def test_of_requests_with_one_id_the_newest_is_meant(server: FeedbackServer) -> None:
    for tag in ("old", "new"):
        server.ask(request_id="same", metadata={"tag": tag})
    assert server.tell(request_id="cmpl-same", success=True).json["category"] == "new"
    server.ask(request_id="same")
    assert server.tell(request_id="cmpl-same", success=True).status == 200


def test_old_requests_are_forgotten(server: FeedbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MAX_IDS", 4)
    ids = [server.ask().json["id"] for _ in range(3)]
    assert [server.tell(request_id=each, success=True).status for each in ids] == [404, 200, 200]


def test_categories_are_bounded(server: FeedbackServer) -> None:
    for i in range(MAX_TAGS + 2):
        told = server.tell(request_id=server.ask().json["id"], success=True, category=f"c{i}")
        assert told.json["category"] == (f"c{i}" if i < MAX_TAGS else "other")
    assert len(server.table()) == MAX_TAGS + 1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "request_id", "request_id: it is missing"),
        ({"request_id": 5, "success": True}, "request_id", "expected 1 to 160 printable ASCII characters"),
        ({"request_id": "x" * 161, "success": True}, "request_id", "expected 1 to 160 printable"),
        ({"request_id": "é", "success": True}, "request_id", "expected 1 to 160 printable"),
        ({"request_id": "x"}, "success", "success: exactly one of success and score is needed"),
        ({"request_id": "x", "success": True, "score": 1}, "success", "exactly one of success and score"),
        ({"request_id": "x", "success": 1}, "success", "expected true or false"),
        ({"request_id": "x", "score": 1.5}, "score", "expected a number 0 to 1"),
        ({"request_id": "x", "score": "good"}, "score", "expected a number 0 to 1"),
        ({"request_id": "x", "success": True, "category": "a b"}, "category", "expected 1 to 64 letters, digits"),
        ({"request_id": "x", "success": True, "comment": "x" * 2001}, "comment", "expected a text of up to 2000"),
        ({"request_id": "x", "success": True, "comments": "x"}, "comments", "there is no such parameter"),
    ],
)
def test_what_is_refused(server: FeedbackServer, fields: dict[str, Any], param: str, message: str) -> None:
    answer = server.tell(**fields)
    assert answer.status == 400 and answer.error["param"] == param and message in answer.error["message"]
    assert server.table() == []


@pytest.mark.parametrize("prompts", [False, True])
def test_comments_are_logged_as_prompts_are(
    server: FeedbackServer, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest, prompts: bool
) -> None:
    request.addfinalizer(lambda: configure("json"))
    configure("json", prompts=prompts)
    logging.getLogger().addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "pilotfish.server.observe.feedback")
    request_id = server.ask().json["id"]
    assert server.tell(request_id=request_id, success=False, comment="it said Elfriede").status == 200
    (line,) = (vars(record)["fields"] for record in caplog.records if record.message == "feedback")
    fields = {"about": request_id, "category": "none", "mode": "sync", "score": 0.0}
    assert line == ({**fields, "comment": "it said Elfriede"} if prompts else fields)
