"""Variants of speculation in a server: what requests get, what is told, what a reload and the guard change."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import http_double
import msgspec
import pytest
from refusals import refused

from pilotfish.engine.targets.replica import ReplicaHealth
from pilotfish.errors import ParameterError
from pilotfish.server.auth import Caller, Keyring, load_keyring
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.traffic.rollout import Rollout
from pilotfish.wire.serving import PoolLoad, Status

FILE = """
[[variant]]
name = "holdout"
mode = "off"
holdout = true
share = 0.5
[[variant]]
name = "next"
draft = "r2"
nodes = 4
tags = ["canary"]
"""


class RolloutServer(http_double.Server):
    def __init__(self, engine: http_double.Engine, folder: Path, keys: Keyring | None = None) -> None:
        self.file = folder / "rollout.toml"
        self.file.write_text(FILE)
        self.rollout = Rollout(self.file, metrics := ServerMetrics("tiny"), wall=lambda: 1000.0)
        super().__init__(engine, keys, metrics, rollout=self.rollout)


@pytest.fixture
def server(engine: http_double.Engine, tmp_path: Path) -> RolloutServer:
    return RolloutServer(engine, tmp_path)


def with_pools(engine: http_double.Engine, **revisions: str) -> None:
    """Its target tells of draft pools with these revisions."""
    pools = [PoolLoad(name, True, 0, 0, 0.0, 0.0, revision=revision) for name, revision in revisions.items()]
    status = Status(http_double.IDENTITY, 0, 0, 0, 0, "one", pools=pools)
    engine.health = replace(http_double.Health(), replicas=(ReplicaHealth("target", status=status),))


def test_the_draft_pools_of_all_targets_are_told(engine: http_double.Engine) -> None:
    client = http_double.Client(http_double.application(engine))
    assert client.get("/v1/drafts").json == {"data": [], "object": "list"}
    with_pools(engine, east="r1", west="r2")
    told = client.get("/v1/drafts").json["data"]
    assert [(one["target"], one["pool"]["name"], one["pool"]["revision"]) for one in told] == [
        ("target", "east", "r1"),
        ("target", "west", "r2"),
    ]
    assert told[0]["pool"]["delay_ms"] is None and told[0]["pool"]["capabilities"] == []


def test_each_request_gets_its_variant(server: RolloutServer) -> None:
    names = [server.ask(user=str(number)).json["pilotfish"]["variant"] for number in range(40)]
    given = {(one.max_nodes, one.draft) for one in server.engine.submitted}
    assert set(names) == {"holdout", "next"} and given == {(0, ""), (4, "r2")}
    assert [one.max_nodes == 0 for one in server.engine.submitted] == [name == "holdout" for name in names]


def test_a_tag_pins_and_a_request_may_want_less(server: RolloutServer) -> None:
    for speculation, nodes in ((None, 4), ({"max_nodes": 2}, 2), ({"max_nodes": 6}, 4), ({"mode": "off"}, 0)):
        own = {} if speculation is None else {"speculation": speculation}
        answer = server.ask(metadata={"tag": "canary"}, **own)
        assert answer.json["pilotfish"] == {"variant": "next"}
        assert (server.engine.submitted[-1].max_nodes, server.engine.submitted[-1].draft) == (nodes, "r2")
    arms = server.rollout.arms.arms
    assert arms["next"].pinned == 4 and arms["next"].requests == 0, "what is pinned enters no comparison"


def test_the_last_event_of_a_stream_tells_the_variant(server: RolloutServer) -> None:
    events = [event for event in server.ask(stream=True, metadata={"tag": "canary"}).events if isinstance(event, dict)]
    assert [event.get("pilotfish") for event in events][-1] == {"variant": "next"}
    assert all("pilotfish" not in event for event in events[:-1])


def test_without_a_file_answers_say_nothing(engine: http_double.Engine) -> None:
    client = http_double.Client(http_double.application(engine))
    assert "pilotfish" not in client.post(http_double.COMPLETIONS, {"prompt": "x"}).json
    told = client.get("/v1/rollout").json
    assert [variant["name"] for variant in told["variants"]] == ["default"] and told["holdout"] == ""
    refused = client.post("/v1/rollout/reload", {})
    assert refused.status == 400 and "--rollout" in refused.json["error"]["message"]


def test_what_came_of_requests_is_told_by_variant_and_by_cohort(server: RolloutServer) -> None:
    for number in range(30):
        server.ask(user=str(number), temperature=0.0)
    told = server.client.get("/v1/rollout").json
    counts = {name: arm["requests"] for name, arm in told["arms"].items()}
    assert sum(counts.values()) == 30 and set(counts) == {"holdout", "next"} and told["holdout"] == "holdout"
    windows = server.client.get("/v1/rollout/statistics").json["windows"]
    keys = [cell["key"] for window in windows for cell in window["cells"]]
    assert {key["variant"] for key in keys} == {"holdout", "next"}
    assert {(key["temperature"], key["output"], key["script"]) for key in keys} == {("0", "text", "latin")}
    samples = server.samples("pilotfish_variant")
    assert samples['pilotfish_variant_requests_total{reason="stop",variant="next"}'] == counts["next"]
    assert samples['pilotfish_variant_accepted_tokens_total{variant="next"}'] > 0


def test_the_guard_hears_nothing_of_requests_whose_clients_want_no_guesses(server: RolloutServer) -> None:
    server.ask(metadata={"tag": "canary"}, speculation={"mode": "off"})
    assert not server.rollout._steps
    server.ask(metadata={"tag": "canary"})
    assert server.rollout._steps.keys() == {"next"}


def test_a_reload_takes_effect_for_the_next_request(server: RolloutServer) -> None:
    with_pools(server.engine, first="r2", second="r3")
    server.file.write_text(FILE.replace("nodes = 4", "nodes = 7").replace('"r2"', '"r3"'))
    assert server.client.post("/v1/rollout/reload", {}).json["variants"][1]["nodes"] == 7
    server.ask(metadata={"tag": "canary"})
    assert (server.engine.submitted[-1].max_nodes, server.engine.submitted[-1].draft) == (7, "r3")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            FILE.replace("r2", "r9"),
            "variant.draft: 'r9' is not allowed; expected the revision of a pool that serves: r2",
        ),
        (FILE.replace("share = 0.5", "share = 1.5"), "variant[0].share: 1.5"),
        ("[[variant]", "rollout: "),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(server: RolloutServer, text: str, told: str) -> None:
    with_pools(server.engine, first="r2")
    server.file.write_text(text)
    refused = server.client.post("/v1/rollout/reload", {})
    assert refused.status == 400 and told in refused.json["error"]["message"]
    assert server.client.get("/v1/rollout").json["variants"][1]["nodes"] == 4
    assert server.ask(metadata={"tag": "canary"}).status == 200


def test_a_draft_that_no_pool_is_is_told_once(server: RolloutServer, caplog: pytest.LogCaptureFixture) -> None:
    """While none has told anything, all may still be loading."""
    for second, pools in enumerate(({}, {"a": "r1"}, {"a": "r1"}, {"a": "r1", "b": "r2"}, {"a": "r1"}), 1):
        server.rollout.look(pools, float(10 * second))
        assert len([one for one in caplog.records if "revision r2" in one.message]) == (0, 1, 1, 1, 2)[second - 1]


def test_a_file_that_is_gone_changes_nothing(server: RolloutServer) -> None:
    server.file.unlink()
    assert "a file that can be read" in refused(ParameterError, server.rollout.reload, [])
    assert server.rollout.variants.names == ["holdout", "next"]
    assert "No such file" in refused(ParameterError, Rollout, server.file, server.metrics)


def test_what_was_compared_with_another_holdout_is_forgotten(server: RolloutServer) -> None:
    server.ask()
    server.file.write_text(FILE.replace("nodes = 4", "nodes = 5"))
    server.rollout.reload(["r2"])
    assert sum(arm.requests for arm in server.rollout.arms.arms.values()) == 1
    server.file.write_text(FILE.replace('"holdout"', '"off"'))
    server.rollout.reload(["r2"])
    assert not server.rollout.arms.arms and server.rollout.arms.holdout == "off"


def test_only_an_admin_may_look(engine: http_double.Engine, tmp_path: Path) -> None:
    keys = load_keyring(["a-secret-of-one-caller"])
    server = RolloutServer(engine, tmp_path, keys=keys)
    header = {"authorization": "Bearer a-secret-of-one-caller"}
    for path in ("/v1/rollout", "/v1/rollout/statistics", "/v1/drafts"):
        assert server.client.get(path).status == 401
        assert server.client.get(path, **header).status == 403
    assert server.client.post("/v1/rollout/reload", {}, **header).json["error"]["code"] == "not_an_admin"
    owner = Caller("op", admin=True, digest=keys.caller(header["authorization"], None).digest)  # type: ignore[union-attr]
    admin = RolloutServer(engine, tmp_path, keys=Keyring([owner]))
    assert admin.client.get("/v1/rollout", **header).status == 200


def test_a_cut_reaches_requests_that_run(server: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give up guessing; new ones do not begin to; neither counts in the comparison."""
    gate = asyncio.Event()

    def script(submitted: http_double.Submitted) -> Iterable[http_double.Update | asyncio.Event]:
        first, *rest = http_double.saying(server.engine.tokenizer, "a = b + c")(submitted)
        return [first, gate, *rest]  # type: ignore[list-item]

    async def traffic() -> http_double.Answer:
        asking = asyncio.create_task(http_double.exchange(server.app, "POST", http_double.COMPLETIONS, body, {}))
        while not server.engine.submitted:
            await asyncio.sleep(0)
        assert server.engine.submitted[0].max_nodes == 4
        monkeypatch.setattr(server.rollout.guard, "share", lambda name: 0.0 if name == "next" else 1.0)
        server.rollout.look({}, 10.0)
        assert server.engine.submitted[0].max_nodes == 0
        gate.set()
        return await asking

    server.engine.script = script  # type: ignore[assignment]
    body = json.dumps({"prompt": "x", "metadata": {"tag": "canary"}}).encode()
    assert asyncio.run(traffic()).status == 200
    assert server.samples("pilotfish_variant")['pilotfish_variant_share{variant="next"}'] == 0.0
    server.engine.script = http_double.saying(server.engine.tokenizer, "done")
    server.file.write_text(FILE.replace('tags = ["canary"]', ""))
    server.rollout.reload(["r2"])
    for number in range(20):
        server.ask(user=str(number))
    assert {one.max_nodes for one in server.engine.submitted[1:]} == {0}
    assert server.rollout.arms.arms["next"].requests == 0 and server.rollout.arms.arms["next"].cut > 0


@pytest.mark.parametrize(
    ("pools", "tag", "pool", "drafts"),
    [
        ({}, None, "", {"none", "any"}),
        ({"a": "r1"}, None, "", {"none", "r1"}),
        ({"a": "r1", "b": ""}, None, "a", {"none", "r1"}),
        ({"a": "r1", "b": ""}, None, "b", {"none", "b"}),
        ({"a": "r1", "b": ""}, None, "", {"none", "any"}),
        ({"a": "r1", "b": ""}, "canary", "b", {"r2"}),
    ],
)
def test_a_request_counts_for_the_draft_that_was_to_guess(
    server: RolloutServer, pools: dict[str, str], tag: str | None, pool: str, drafts: set[str]
) -> None:
    """Not for who guessed right: what it achieved must not decide where it counts."""

    def script(submitted: http_double.Submitted) -> list[http_double.Update]:
        first, *rest = http_double.saying(server.engine.tokenizer, "a = b + c")(submitted)
        told = msgspec.structs.replace(first.delta, pool=pool)  # type: ignore[union-attr]
        return [http_double.Update(told), *rest]  # type: ignore[list-item]

    server.engine.script = script
    server.file.write_text(FILE.replace('draft = "r2"\n', "" if tag is None else 'draft = "r2"\n'))
    server.rollout.reload(["r2"])
    server.rollout.look(pools, 10.0)
    for number in range(20):
        server.ask(user=str(number), **({} if tag is None else {"metadata": {"tag": tag}}))
    cells = [cell for window in server.rollout.statistics().windows for cell in window.cells]
    assert {cell.key.draft for cell in cells} == drafts
