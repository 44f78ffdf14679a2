"""Shadows beside real engines: whatever they do, outputs are the target's own, and what they score is what it wrote."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from inline_drafts import draft_worker, inline_drafts
from sizes import in_soak, sized
from support import SETTINGS, SNIPPETS, VOCAB, assert_idle, eventually, make_engine, run, running, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.messages import Commit, Hello, Load, Open, Tree
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.drafts import shadow_drafts
from pilotfish.engine.engine import Engine
from pilotfish.engine.targets.status import identity_of, status_of
from pilotfish.errors import InputError, ParameterError, WireError
from pilotfish.wire.channel import decode_to_draft, encode
from pilotfish.wire.curve_keys import PoolClient, PoolKeys, new_key_pair, write_key_pair
from pilotfish.wire.serving import SERVER_DECODER, ShadowReport, Status
from pilotfish.wire.sockets import ListeningChannel
from pilotfish.workers.target_shadow import ShadowMachine

LENGTH = 24
Outputs = list[list[int]]
#: Time for a few levels of a tiny draft.
PACE = "target=6ms"


ALL = [SamplingParams(**{"max_tokens": LENGTH, "seed": seed, **one}) for seed, one in enumerate(SETTINGS)]


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[list[int]]:
    """What the target writes without any draft."""
    return run(make_engine(llama), SNIPPETS, ALL)


def report(engine: Engine) -> ShadowReport:
    assert engine.shadows is not None
    [found] = engine.shadows.reports()
    return found


@contextmanager
def shadowed(target: Path, endpoint: str, ready: bool = True, **config: Any) -> Iterator[Engine]:
    """Whoever listens at the endpoint is its shadow, and `ready`."""
    own = {"mode": "off", "shadow_pool": (endpoint,), "max_requests": 1, **config}
    with make_engine(target, **own) as engine:
        if ready:
            eventually(lambda: report(engine).ready)
        yield engine


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/shadow"


def settled(engine: Engine, requests: int) -> ShadowReport:
    """Once so many requests were followed to their ends."""
    shadows = engine.shadows
    assert shadows is not None
    eventually(lambda: report(engine).requests == requests and not any(one.machine._known for one in shadows._shadows))
    return report(engine)


@pytest.mark.parametrize("mode", sized(["off", "async"], ["off", "sync", "async"]))
def test_outputs_are_those_without_it(
    llama: Path, draft: Path, alone: Outputs, endpoint: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inline_drafts(monkeypatch), draft_worker(EngineConfig(target=llama, draft=draft, kv_slots=4096), endpoint):
        fields = {"drafter": "lm", "draft_workers": 1} if mode == "async" else {"drafter": "lm"}
        with shadowed(llama, endpoint, draft=draft, mode=mode, pace=PACE, **fields) as engine:
            assert run(engine, SNIPPETS, ALL) == alone
            score = settled(engine, len(SNIPPETS))
            assert score.steps + score.accepted == sum(map(len, alone))  # each token once
            assert score.late < score.steps and score.accepted > 0 and score.tokens_per_step > 1
            assert score.tokens_per_second > 0 and score.live_tokens_per_second > 0 and score.cpu_seconds > 0
            assert score.error > -1
            assert_idle(engine)


@in_soak
def test_a_shadow_is_killed_and_comes_back(llama: Path, draft: Path, alone: Outputs, endpoint: str) -> None:
    config = EngineConfig(target=llama, draft=draft, kv_slots=4096)
    with shadowed(llama, endpoint, ready=False, pace=PACE) as engine:
        with draft_worker(config, endpoint):
            eventually(lambda: report(engine).ready)
            assert run(engine, SNIPPETS[:4], ALL[:4]) == alone[:4]
            eventually(lambda: report(engine).steps > 0)
        eventually(lambda: not report(engine).ready)
        assert run(engine, SNIPPETS, ALL) == alone  # nobody drafts for them
        before = report(engine).requests
        with draft_worker(config, endpoint):
            eventually(lambda: report(engine).ready and report(engine).requests > before)
            assert run(engine, SNIPPETS, ALL) == alone


def test_where_nobody_listens_nothing_waits(
    llama: Path, alone: Outputs, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shadow_drafts, "ANSWER", 0.05)
    with shadowed(llama, endpoint, ready=False) as engine:
        assert run(engine, SNIPPETS, ALL) == alone
        eventually(lambda: "scored once it serves" in caplog.text)
        score = report(engine)
        assert (score.ready, score.requests, score.steps, score.tokens_per_second) == (False, 0, 0, 0.0)


@contextmanager
def scripted_pool(
    endpoint: str, answer: Callable[[Open | Commit], bytes | None], keys: PoolKeys | None = None
) -> Iterator[ListeningChannel]:
    """It says that it is ready, and answers each Open and Commit with whatever `answer` gives."""
    ended = threading.Event()

    def hear(peer: Peer, message: object) -> None:
        if isinstance(message, Hello):
            channel.send(peer, encode(Load("scripted", 0, 0, 0, 100, 1.0, 1.0, revision="r7")))
        elif isinstance(message, Open | Commit) and (sent := answer(message)) is not None:
            channel.send(peer, sent)

    def serve() -> None:
        while not ended.is_set():
            for received in channel.receive(0.01):
                hear(received.peer, decode_to_draft(bytes(received.frame)))

    with closing(ListeningChannel(endpoint, keys)) as channel, running(serve, ended.set):
        yield channel


def nonsense(seed: int) -> Callable[[Open | Commit], bytes]:
    """Frames that are no message, trees of foreign tokens, of wrong ids, and of sessions that are not."""
    rng, numbers = np.random.default_rng(seed), count(1)

    def answer(message: Open | Commit) -> bytes:
        kind, number = int(rng.integers(4)), next(numbers)
        base = len(message.tokens) if isinstance(message, Open) else message.base_len + len(message.tokens)
        tokens = rng.integers(0, VOCAB + (100 if kind == 1 else 0), 8).tolist()
        ids = [1] * 8 if kind == 2 else list(range(8 * number, 8 * number + 8))
        tree = Tree(message.session + (kind == 3), message.generation, number, base, ids, [0] * 8, tokens, [-0.1] * 8)
        return bytes(rng.integers(0, 256, 40).tolist()) if kind == 0 else encode(tree)

    return answer


def test_a_malicious_one_harms_its_own_score_alone(llama: Path, alone: Outputs, endpoint: str) -> None:
    with scripted_pool(endpoint, nonsense(0)), shadowed(llama, endpoint) as engine:
        for _ in range(3):
            assert run(engine, SNIPPETS, ALL) == alone
        eventually(lambda: report(engine).requests > 0)
        score = report(engine)
        assert score.revision == "r7" and score.accepted <= 0.2 * score.steps
        assert_idle(engine)


def test_a_silent_one_is_late_at_every_step(llama: Path, alone: Outputs, endpoint: str) -> None:
    with scripted_pool(endpoint, lambda _: None), shadowed(llama, endpoint, drafter="lm") as engine:
        assert run(engine, SNIPPETS, ALL) == alone
        score = settled(engine, len(SNIPPETS))
        assert score.late == score.steps == sum(map(len, alone)) and score.trees == 0
        assert score.tokens_per_step == 1.0


def test_what_would_guess_beside_it_counts_too(llama: Path, endpoint: str) -> None:
    """n-grams, where the output repeats itself."""
    loop = SamplingParams(max_tokens=64, temperature=0.0, allowed_token_ids=(33, 34))
    with scripted_pool(endpoint, lambda _: None), shadowed(llama, endpoint, drafter="lm+ngram") as engine:
        [output] = run(engine, [SNIPPETS[0]], [loop])
        score = settled(engine, 1)
        assert score.steps + score.accepted == len(output) == 64
        assert score.trees > 0 and score.accepted > 0 and score.late == score.steps


def test_a_constrained_output_is_followed_through_its_grammar(llama: Path, endpoint: str) -> None:
    constraint = Constraint.regex(r"(one fish|two fish)( and red fish){3}")
    asked = SamplingParams(max_tokens=80, seed=1, temperature=0.8, structured_outputs=constraint)
    with scripted_pool(endpoint, lambda _: None), shadowed(llama, endpoint, drafter="lm") as engine:
        [output] = run(engine, [SNIPPETS[0]], [asked])
        score = settled(engine, 1)
        assert round(score.tokens_per_step * score.steps) == len(output)  # it may end with a guess
        assert score.accepted > score.steps


def test_servers_are_told(llama: Path, endpoint: str) -> None:
    with scripted_pool(endpoint, lambda _: None), shadowed(llama, endpoint) as engine:
        run(engine, SNIPPETS[:1], ALL[:1])
        told = settled(engine, 1)
        status = SERVER_DECODER.decode(encode(status_of(engine, identity_of(engine), "first")))
        assert isinstance(status, Status) and status.shadows == [told]
        assert (told.name, told.revision, told.requests) == (endpoint, "r7", 1)


def test_one_that_refuses_says_so_in_a_line(
    llama: Path, alone: Outputs, endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_model(tmp_path / "other", "llama", tokens=400)
    with (
        draft_worker(EngineConfig(target=llama, draft=other, kv_slots=4096), endpoint),
        shadowed(llama, endpoint, ready=False) as engine,
    ):
        eventually(lambda: f"shadow_pool: {endpoint} refused" in caplog.text)
        assert run(engine, SNIPPETS, ALL) == alone and report(engine).requests == 0


def test_one_whose_steps_cannot_be_made_is_given_up(
    llama: Path, alone: Outputs, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ShadowMachine, "turn", Mock(side_effect=WireError("broken")))
    with scripted_pool(endpoint, lambda _: None), shadowed(llama, endpoint, ready=False) as engine:
        eventually(lambda: "is not scored any more" in caplog.text)
        assert run(engine, SNIPPETS, ALL) == alone and not report(engine).ready
    assert [record.levelno for record in caplog.records if "not scored" in record.message] == [logging.ERROR]


def test_a_pool_with_keys(llama: Path, tmp_path: Path) -> None:
    own, pool = new_key_pair(), new_key_pair()
    write_key_pair(own, tmp_path / "own.key")
    keys = PoolKeys(pool, {own.public: PoolClient("target", 1.0)})
    given = {"draft_key": tmp_path / "own.key", "shadow_pool_key": (pool.public,)}
    with (
        scripted_pool("tcp://127.0.0.1:0", lambda _: None, keys) as scripted,
        shadowed(llama, scripted.endpoint, **given) as engine,
    ):
        assert report(engine).ready


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"shadow_pool": ("ipc:///a", "ipc:///a")}, "shadow_pool"),
        ({"mode": "async", "draft_pool": ("ipc:///a",), "shadow_pool": ("ipc:///a",)}, "shadow_pool"),
        ({"shadow_pool": ("ipc:///a",), "shadow_pool_key": ("k" * 40,)}, "draft_key"),
        ({"shadow_pool_key": ("k" * 40,), "draft_key": Path("own.key")}, "shadow_pool_key"),
        ({"shadow_pool": ("ipc:///a",), "shadow_share": 0.0}, "shadow_share"),
        ({"shadow_pool": ("ipc:///a",), "shadow_share": 1.5}, "shadow_share"),
    ],
)
def test_what_cannot_be_is_refused(llama: Path, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as raised:
        EngineConfig(target=llama, **given)
    assert raised.value.field == field


@pytest.mark.parametrize("endpoint", ["http://here", "tcp://192.0.2.1:7070"])
def test_an_address_that_cannot_be_dialled_is_refused(llama: Path, endpoint: str) -> None:
    """One that is none, and one of another host without keys."""
    with pytest.raises(InputError, match="shadow_pool"):
        make_engine(llama, shadow_pool=(endpoint,))


def test_workers_have_none(llama: Path, draft: Path) -> None:
    keys = {"shadow_pool_key": ("k" * 40,), "draft_key": Path("own.key")}
    config = EngineConfig(target=llama, draft=draft, shadow_pool=("ipc:///a",), **keys)
    assert not (config.of_draft.shadow_pool or config.of_prefill.shadow_pool or config.of_rank(1).shadow_pool)
