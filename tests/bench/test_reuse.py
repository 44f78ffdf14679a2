"""Requests that begin alike: what is found of them, what that costs, and whom it shows. No test says how fast."""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import Measure
from inline_drafts import inline_drafts
from peer_doubles import start_inline
from scipy.stats import mannwhitneyu
from sizes import sized
from support import make_engine

from pilotfish.bench import compare, reuse
from pilotfish.bench.dialogues import (
    RETRIES,
    SAMPLED,
    SAMPLES,
    STEPS,
    TASKS,
    TURNS,
    WORKLOADS,
    Ask,
    TextSupply,
    agent,
    conversation,
    play,
    retries,
)
from pilotfish.bench.isolation import ANOTHER, HIMSELF, NOBODY, chance_of, report_of, run_isolation, share_sooner
from pilotfish.bench.overhead import run_overhead
from pilotfish.bench.peers.protocol import Generated, LoadedPeer, Question
from pilotfish.bench.reuse import OURS, Answered, ask_engine, run_reuse
from pilotfish.bench.workload import Prompt
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.errors import ParameterError
from pilotfish.kv.tiers import KVTiers

SIZES = {"threads": 1, "kv_slots": 4096, "shared": 64}


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with inline_drafts(monkeypatch):
        yield


def asked(script: object) -> list[Ask]:
    """The requests of a script whose answers are all `!`."""
    asks: list[Ask] = []
    play(script, lambda ask: asks.append(ask) or "!")  # type: ignore[arg-type, func-returns-value]
    return asks


def test_scripts() -> None:
    assert [(ask.text, ask.timed) for ask in asked(conversation("a", ["b", "c"]))] == [
        ("a", False),
        ("a!b", True),
        ("a!b!c", True),
    ]
    assert [(ask.text, ask.timed) for ask in asked(agent("s", [["1", "2"], ["3", "4"]]))] == [
        ("s1", False),
        ("s1!2", True),
        ("s3", True),
        ("s3!4", True),
    ]
    assert {ask.text for ask in asked(retries("r"))} == {"r"}


def test_texts_have_the_tokens_asked_for(llama: Path) -> None:
    tokenizer = make_engine(llama).tokenizer
    prompts = [Prompt("1", "def add(a, b):\n"), Prompt("2", tokenizer.encode("import os"))]
    text = TextSupply(prompts, tokenizer).take(30, "heading\n")
    assert text.startswith("heading\ndef add(a, b):\n\nimport os\n") and abs(len(tokenizer.encode(text)) - 30) <= 1


@pytest.mark.parametrize("mode", sized(["off"], ["off", "async"]))
def test_reuse(measure: Measure, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVTiers, "computed", lambda *_: None)  # all is loaded, however long it takes
    monkeypatch.setattr(reuse, "SLOWNESS", 0.001)
    results = measure(run_reuse, "reuse", **SIZES, max_tokens=4, repeats=2, mode=mode).results
    rows = {(row["workload"], row["contestant"]): row for row in results["first_tokens"]}
    assert len(rows) == len(WORKLOADS) * len(OURS) and set(results["equal_outputs"].values()) == {1}
    assert {workload: rows[workload, "device"]["requests"] for workload in WORKLOADS} == dict(
        zip(WORKLOADS, (2 * TURNS, 2 * (TASKS * STEPS - 1), 2 * RETRIES, 2), strict=True)
    )
    for workload in WORKLOADS:
        own = rows[workload, "device"]
        assert rows[workload, "off"]["cached_tokens"] == 0 and own["first_token_ms"].minimum > 0
        assert own["speedup"].count == own["requests"]
        if workload != SAMPLED:
            assert own["cached_tokens"] >= SIZES["shared"] - 2
        for tier in ("host", "disk", "slow disk"):
            assert rows[workload, tier]["cached_tokens"] >= (workload != SAMPLED) * (
                own["cached_tokens"] - OBJECT_TOKENS
            )
    assert rows[SAMPLED, "device"]["prompt_tokens"] > 900


def test_an_answer_has_every_sample(llama: Path) -> None:
    answered = ask_engine(make_engine(llama), Ask("def add(a, b):", timed=True, samples=SAMPLES), 5)
    assert [len(output) for output in answered.outputs] == [5] * SAMPLES and answered.seconds > 0
    assert answered.cached_tokens == 0 and answered.prompt_tokens > 3


@pytest.mark.parametrize("mode", ["off", "async"])
def test_overhead(measure: Measure, mode: str) -> None:
    given = {"threads": 1, "kv_slots": 512, "max_tokens": 24, "concurrencies": "1,3", "repeats": 2, "mode": mode}
    results = measure(run_overhead, "overhead", **given).results
    assert [(row["concurrency"], row["pairs"]) for row in results["overhead"]] == [(1, 2), (3, 2)]
    assert all(row["cached_tokens"] == 0 and row["equal_outputs"] == 1 for row in results["overhead"])


def test_isolation(measure: Measure) -> None:
    results = measure(run_isolation, "isolation", **SIZES, repeats=3).results
    found = {row["asked_before_by"]: row["cached_tokens"] for row in results["first_tokens"]}
    assert max(found[NOBODY], found[ANOTHER]) < 4 and found[HIMSELF] == pytest.approx(SIZES["shared"] - 1, abs=1)


def test_times_that_tell_and_times_that_do_not() -> None:
    slow, same, quick = (
        [Answered(8, 0, seconds, "", [[1]]) for seconds in own] * 20
        for own in ([3.0, 4.0, 5.0], [5.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    )
    report = report_of({NOBODY: slow, ANOTHER: same, HIMSELF: quick})
    assert not report.failed and report.results["isolated"] and report.results["reuse_shows"]
    assert report_of({NOBODY: slow, ANOTHER: quick, HIMSELF: quick}).results["isolated"] is False
    assert report_of({NOBODY: slow, ANOTHER: quick, HIMSELF: quick}).failed
    assert report_of({NOBODY: slow, ANOTHER: same, HIMSELF: same}).failed


def test_the_rank_test_is_that_of_scipy() -> None:
    draw = np.random.default_rng(0)
    for shift in (0.0, 0.2, 1.0):
        times, others = draw.normal(0, 1, 60), draw.normal(shift, 1, 80)
        expected = mannwhitneyu(times, others, use_continuity=False, method="asymptotic")
        sooner = share_sooner(times.tolist(), others.tolist())
        assert sooner == pytest.approx(1 - expected.statistic / (60 * 80))
        assert chance_of(sooner, 60, 80) == pytest.approx(expected.pvalue)
    assert share_sooner([1, 2], [2, 3]) == 0.875


def test_openvino_plays_too(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but samples, by a peer that goes on with 1, 2, 3, …"""

    def generate(asked: Question) -> Generated:
        return Generated(seconds=1.0, tokens=list(range(1, asked.max_tokens + 1)))

    peer = LoadedPeer(dict.fromkeys(reuse.THEIRS.values(), generate), "exact")
    monkeypatch.setattr(compare, "find_spec", lambda name: name)
    writer = SimpleNamespace(gguf_of=lambda model, weights: f"{model}-{weights}")
    monkeypatch.setitem(sys.modules, "pilotfish.model.backends.gguf_file", writer)
    monkeypatch.setitem(sys.modules, "pilotfish.bench.peers.openvino_turns", SimpleNamespace(load=lambda _: peer))
    monkeypatch.setattr(reuse, "start_peer", start_inline)
    results = measure(run_reuse, "reuse", **SIZES, max_tokens=2, repeats=1, openvino=True).results
    rows = {(row["workload"], row["contestant"]): row for row in results["first_tokens"]}
    assert rows.keys() == {*product(WORKLOADS, (*OURS, *reuse.THEIRS))} - {*product((SAMPLED,), reuse.THEIRS)}
    assert all(row["cached_tokens"] is None for (_, name), row in rows.items() if name in reuse.THEIRS)


def test_openvino_must_be_installed(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda _: None)
    with pytest.raises(ParameterError, match=r"^openvino: .* pip install 'pilotfish\[compare\]'$"):
        measure(run_reuse, "reuse", **SIZES, openvino=True)
