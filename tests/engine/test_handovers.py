"""Prompts computed by prefill workers: the same outputs as without them, in every mode, over every transport."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inline_drafts import inline_drafts
from inline_prefills import assert_nothing_left, inline_prefills, prefill_worker
from sizes import sized
from support import MODES, VOCAB, drain, make_engine, run, settle, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import PrefillConfig
from pilotfish.core.prefilling import handover_machine
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.prefills import prefill_pool
from pilotfish.engine.sample import Sample
from pilotfish.errors import ParameterError
from pilotfish.kv.nixl import nixl_installed
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair
from pilotfish.wire.sockets import ListeningChannel

#: Of the long model.
CONTEXT = 4224
#: Around a slot, a key, a forward here and one there; and as long as prompts get.
LENGTHS = sized(
    (1, 2, 64, 65, 256, 300, 1000, 2050), (1, 2, 3, 63, 64, 65, 66, 255, 256, 257, 300, 1000, 2047, 2050, 4000)
)
#: How the segments' bytes come. Without a way to read the workers' memory they are fetched.
TRANSPORTS: dict[str, tuple[str, ...]] = {"shm": ("shm",), "ipc": ()}
if nixl_installed():
    TRANSPORTS["nixl"] = ("nixl",)
DRAFTING = ("off", "sync", "async")
SLOTS = {"kv_slots": 16_000}
CASES = sized(
    (("off", "shm"), ("sync", "ipc"), ("async", "shm"), *(("off", each) for each in TRANSPORTS if each == "nixl")),
    tuple((mode, transport) for mode in DRAFTING for transport in TRANSPORTS),
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hand-over is given up because this machine is busy: what depends on time is tested in tests/core."""
    for name in ("STALL", "LONGEST_STALL"):
        monkeypatch.setattr(handover_machine, name, 1000.0)


def params(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 5, "temperature": 0.8, **fields})


def prompt(length: int, seed: int = 0) -> list[int]:
    """None begins like another."""
    tokens: list[int] = np.random.default_rng((length, seed)).integers(1, VOCAB, length).tolist()
    return tokens


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def long_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("draft"), "llama", perturbed=0.05, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def outputs(long: Path) -> list[list[int]]:
    """Of a prompt of each length, computed where they are decoded."""
    with make_engine(long, prefix_cache=False, **SLOTS) as engine:
        return run(engine, [prompt(length) for length in LENGTHS], [params()] * len(LENGTHS))


def handing(target: Path, **config: Any) -> Engine:
    """Everything that may be sent is sent."""
    return make_engine(target, **{"prefill_workers": 1, "prefill_threshold": "1", **SLOTS, **config})


def ended(engine: Engine, samples: Sequence[Sample]) -> list[list[int]]:
    drain(engine)
    return [sample.token_ids for sample in samples]


def reports(samples: Sequence[Sample]) -> list[HandOverReport]:
    return [report for sample in samples for report in sample.request.stats.handovers]


#: In one case in the suite, where modes and transports have nothing to do with it.
ONE_CASE = pytest.mark.parametrize("engine", CASES[: sized(1, 99)], ids="-".join, indirect=True)


@pytest.fixture(params=CASES, ids="-".join)
def engine(
    request: pytest.FixtureRequest, long: Path, long_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    mode, transport = request.param
    options = {"draft": long_draft, **MODES[mode], "prefill_transports": TRANSPORTS[transport]}
    prefills = inline_prefills(monkeypatch, nixl=transport == "nixl")
    with inline_drafts(monkeypatch), prefills as workers, handing(long, **options) as engine:
        yield engine
        assert_nothing_left(workers, engine)


def test_prompts_of_any_length(engine: Engine, outputs: list[list[int]]) -> None:
    """All at once; then again, when both sides have them; then what the worker alone has; then what neither has the end
    of."""
    whole = [prompt(length) for length in LENGTHS]
    first = [sample for tokens in whole for sample in engine.submit(tokens, params())]
    assert ended(engine, first) == outputs
    assert [report.outcome for report in reports(first)] == [WHOLE] * (len(LENGTHS) - 1)  # of one token there is none
    assert sum(report.tokens for report in reports(first)) == sum(length - 1 for length in LENGTHS)
    assert all(report.size == report.tokens * engine.memory.target.slot for report in reports(first))
    assert {report.transport for report in reports(first)} == {(*engine.config.prefill_transports, "ipc")[0]}
    again = [sample for tokens in whole for sample in engine.submit(tokens, params())]
    assert ended(engine, again) == outputs and not reports(again)
    _forget(engine)
    cached = [sample for tokens in whole[-3:] for sample in engine.submit(tokens, params())]
    assert ended(engine, cached) == outputs[-3:]
    assert [(report.tokens, report.cached) for report in reports(cached)] == [(n - 1, n - 2) for n in LENGTHS[-3:]]
    longer = engine.submit([*whole[-2], *prompt(70, seed=1)], params())
    (report,) = reports(longer) if ended(engine, longer) else ()
    assert (report.outcome, report.tokens) == (WHOLE, 69)  # the prompt's last token was computed here


def _forget(engine: Engine) -> None:
    cache = engine.worker.scheduler.cache
    assert cache is not None
    cache.evict(engine.memory.slots)


def test_streams_go_on_while_prompts_are_handed_over(engine: Engine, outputs: list[list[int]]) -> None:
    streams = [sample for seed in range(3) for sample in engine.submit(prompt(20, seed), params(32))]
    while min(len(sample.token_ids) for sample in streams) < 4:
        engine.step()
    late = [sample for place in (-1, -4) for sample in engine.submit(prompt(LENGTHS[place]), params())]
    both = ended(engine, [*streams, *late])
    assert both[3:] == [outputs[-1], outputs[-4]] and {report.outcome for report in reports(late)} == {WHOLE}
    alone = [ended(engine, engine.submit(prompt(20, seed), params(32)))[0] for seed in range(3)]
    assert both[:3] == alone


@ONE_CASE
def test_several_outputs_of_a_prompt_and_its_log_probabilities(engine: Engine, long: Path) -> None:
    asked = [params(n=3, logprobs=2), params(prompt_logprobs=1)]
    with make_engine(long, **SLOTS) as combined:
        expected = [sample for each in asked for sample in combined.submit(prompt(300, seed=2), each)]
        ended(combined, expected)
    samples = [sample for each in asked for sample in engine.submit(prompt(300, seed=2), each)]
    assert ended(engine, samples) == [sample.token_ids for sample in expected]
    assert [sample.logprobs for sample in samples] == [sample.logprobs for sample in expected]
    assert samples[-1].prompt_logprobs == expected[-1].prompt_logprobs
    assert len(reports(samples)) == 1


@pytest.mark.parametrize("mode", sized(["sync"], list(DRAFTING)))
def test_preempted_after_a_hand_over(mode: str, long: Path, long_draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, asked = [prompt(length, seed=3) for length in (300, 280, 260)], params(120)
    with make_engine(long, **SLOTS) as combined:
        expected = run(combined, prompts, [asked] * 3)
    options = {"draft": long_draft, **MODES[mode], "kv_slots": 1000, "prefix_cache": False}
    with inline_drafts(monkeypatch), inline_prefills(monkeypatch) as workers, handing(long, **options) as engine:
        engine.worker.scheduler.headroom = 0
        samples = [sample for tokens in prompts for sample in engine.submit(tokens, asked)]
        told = list[HandOverReport]()
        while engine.busy:
            told += [report for delta in engine.step() for report in delta.handovers]
        assert [sample.token_ids for sample in samples] == expected
        assert sorted(told, key=str) == sorted(reports(samples), key=str)  # each once
        assert engine.worker.scheduler.preemptions
        again = [sample for sample in samples if sample.request.stats.preemptions]
        assert all(len(sample.request.stats.handovers) == 2 for sample in again)
        assert any(second.tokens > first.tokens for first, second in (s.request.stats.handovers for s in again))
        assert_nothing_left(workers, engine)


def test_over_tcp_with_keys(long: Path, tmp_path: Path, outputs: list[list[int]]) -> None:
    keys = {name: new_key_pair() for name in ("pool", "target")}
    for name, pair in keys.items():
        write_key_pair(pair, tmp_path / name)
    (tmp_path / "allow").write_text(f"{keys['target'].public} me\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    model = EngineConfig(target=long, dtype="float32", threads=1, **SLOTS)
    listening = {"key": tmp_path / "pool", "allow": tmp_path / "allow"}
    dialling = {"prefill_key": tmp_path / "target", "prefill_pool_key": (keys["pool"].public,)}
    config = {"prefill_workers": 0, "prefill_pool": (endpoint,), "prefill_transports": (), **dialling}
    with prefill_worker(model.of_prefill, endpoint, **listening) as worker, handing(long, **config) as engine:
        samples = [sample for length in LENGTHS for sample in engine.submit(prompt(length), params())]
        assert ended(engine, samples) == outputs
        assert {(report.transport, report.outcome) for report in reports(samples)} == {("tcp", WHOLE)}
        assert_nothing_left([worker], engine)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gemma3_text", {}),
        ("gpt_oss", {"kv_dtype": "int8"}),
        ("gemma3_text", {"eager": True}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {"kv_dtype": "int8"}),
        *sized([], [(kind, options) for kind in ("qwen3", "gpt_oss", "olmo2") for options in ({}, {"eager": True})]),
    ],
)
def test_other_architectures(
    tiny_models: dict[str, Path], kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = tiny_models[kind], [prompt(length, seed=4) for length in (2, 33, 90)]
    with make_engine(target, **options) as combined:
        expected = run(combined, prompts, [params()] * 3)
    with inline_prefills(monkeypatch) as workers, handing(target, kv_slots=4096, **options) as engine:
        samples = [sample for tokens in prompts for sample in engine.submit(tokens, params())]
        assert ended(engine, samples) == expected
        assert [report.outcome for report in reports(samples)] == [WHOLE] * 3
        assert_nothing_left(workers, engine)


def test_tiers_come_first(long: Path, monkeypatch: pytest.MonkeyPatch, outputs: list[list[int]]) -> None:
    with inline_prefills(monkeypatch) as workers, handing(long, kv_host_memory=0.25) as engine:
        assert engine.tiers is not None
        ended(engine, engine.submit(prompt(1000), params()))
        engine.worker.scheduler.save_all()
        settle(engine.tiers)
        _forget(engine)
        samples = engine.submit(prompt(1000), params())
        assert ended(engine, samples) == [outputs[LENGTHS.index(1000)]]
        stats = samples[0].request.stats
        assert stats.cached_by_tier == {"host": 960} and [report.tokens for report in stats.handovers] == [39]
        assert_nothing_left(workers, engine)


def test_nixl_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_pool, "nixl_installed", lambda: False)
    config = PrefillConfig(model=EngineConfig(target=tmp_path / "nowhere"), listen="tcp://127.0.0.1:0", nixl=True)
    expected = r"nixl: True is not allowed; expected NIXL, which is not installed: pip install 'pilotfish\[nixl\]'"
    with (
        closing(ListeningChannel(config.listen)) as channel,
        pytest.raises(ParameterError, match=expected),
        prefill_pool.serving(config, channel),
    ):
        pass
