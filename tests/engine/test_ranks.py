"""Engines whose target has several ranks: the same tokens in every mode; what they cannot do is refused; none lives on
alone."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from inline_drafts import inline_drafts
from sizes import sized
from support import LATENT, PER_HEAD, SETTINGS, SNIPPETS, assert_idle, drain, make_engine, run
from thread_ranks import thread_ranks

from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.processes import rank, ranks
from pilotfish.engine.targets.status import identity_of
from pilotfish.errors import ParameterError, RankLost
from pilotfish.wire.channel import encode
from pilotfish.wire.link import Done, RankLink

MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "sync": {"mode": "sync", "nodes": 6, "levels": 3, "width": 2},
    "async": {"mode": "async", "nodes": 8, "drafter": "lm"},
}
#: Of each setting some prompts.
PARAMS = [SamplingParams(max_tokens=sized(16, 48), seed=i, **fields) for i, fields in enumerate(SETTINGS)]


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with thread_ranks(monkeypatch), inline_drafts(monkeypatch):
        yield


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("llama", 2, {"kv_slots": 300, "max_rows": 24, "max_requests": 4}),  # some are preempted
        *((kind, 2, {}) for kind in sized(("gpt_oss",), tuple(PER_HEAD))),
        *((kind, 1, {"kv_slots": 300, "max_requests": 4}) for kind in LATENT),
        *sized([], [("llama", 4, {}), ("qwen2", 4, {"eager": True}), ("llama", 2, {"quantization": "int8"})]),
    ],
    ids=str,
)
def test_every_mode_gives_the_same_tokens(
    tiny_models: dict[str, Path], tiny_drafts: dict[str, Path], kind: str, ranks: int, options: dict[str, Any]
) -> None:
    outputs = {}
    for mode, fields in MODES.items():
        given = {**fields, **options, "tensor_parallel": ranks}
        with make_engine(tiny_models[kind], draft=tiny_drafts[kind], **given) as engine:
            outputs[mode] = run(engine, SNIPPETS, PARAMS)
            assert engine.worker.last_step is not None
            assert_idle(engine)
    assert outputs["sync"] == outputs["off"]
    assert outputs["async"] == outputs["off"]


@pytest.mark.usefixtures("on_threads")
def test_a_rank_has_its_part_of_the_memory(tiny_models: dict[str, Path]) -> None:
    plain = make_engine(tiny_models["llama"])
    with make_engine(tiny_models["llama"], tensor_parallel=2) as engine:
        assert [x.keys.shape[1] for x in engine.executor.kv] == [1, 1]  # of two heads
        assert engine.memory.target.slot * 2 == plain.memory.target.slot
        parameters = engine.memory.target.parameters
        assert parameters == plain.memory.target.parameters
        assert (
            0.5 <= engine.memory.target.weights / (4 * parameters) < 0.53
        )  # norms are whole, and parts are padded to panels
        assert "GiB in each of 2 ranks" in engine.memory.describe()
        assert identity_of(engine).ranks == 2


@pytest.mark.usefixtures("on_threads")
def test_a_rank_may_load_longer_than_a_message_may_take(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = rank.load_configured

    def slowly(*given: Any) -> Any:
        time.sleep(0.6)
        return load(*given)

    monkeypatch.setattr(rank, "load_configured", slowly)
    monkeypatch.setattr(ranks, "TAKING", 0.3)
    with make_engine(llama, tensor_parallel=2, kv_slots=256) as engine:
        assert engine.ranks is not None and len(engine.ranks._links) == 1


@pytest.mark.usefixtures("on_threads")
def test_a_batch_is_not_written_over_one_that_a_rank_has_not_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send, done = RankLink.send, encode(Done())
    monkeypatch.setattr(RankLink, "send", lambda link, frame, *given: frame == done or send(link, frame, *given))
    with make_engine(llama, tensor_parallel=2, kv_slots=256) as engine:
        engine.submit(SNIPPETS[0], PARAMS[0])
        engine.step()  # another batch has another memory
        monkeypatch.setattr(ranks, "TAKING", 0.1)
        monkeypatch.setattr(ranks, "NOTICING", 0.0)
        with pytest.raises(RankLost, match="TimeoutError"):
            engine.step()


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"kv_host_memory": 0.5}, "1 with kv_host_memory 0.5"),
        ({"kv_disk": Path("/tmp")}, "1 with kv_disk /tmp"),
        ({"prefill_workers": 2}, "1 with prefill_workers 2"),
        ({"prefill_pool": ("ipc:///a",)}, "1 with prefill_pool "),
        ({"tensor_parallel": 65}, "an integer 1 to 64"),
        ({"tensor_parallel": 0}, "an integer 1 to 64"),
    ],
)
def test_what_ranks_cannot_do_is_refused(llama: Path, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ParameterError, match=f"^tensor_parallel: .*{line}"):
        EngineConfig(**{"target": llama, "tensor_parallel": 2, **fields})


def test_a_device_of_one_rank_is_refused(llama: Path) -> None:
    with pytest.raises(ParameterError, match=r"^device: 'cpu:0' is not allowed; expected cpu or cuda with tensor"):
        make_engine(llama, tensor_parallel=2, device="cpu:0")


def test_ranks_of_which_one_ends_run_no_forward_any_more(llama: Path) -> None:
    """In processes of their own."""
    with ExitStack() as stack:
        engine = stack.enter_context(make_engine(llama, tensor_parallel=2, kv_slots=256))
        assert run(engine, SNIPPETS[:2], PARAMS[:2]) == run(engine, SNIPPETS[:2], PARAMS[:2])
        (samples,) = [engine.submit(SNIPPETS[2], PARAMS[0])]
        engine.step()
        engine.refuse_lost_rank()
        assert engine.ranks is not None
        (other,) = engine.ranks._supervisor.poll()
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^target rank 1: was ended by signal 9 \(Killed\)$"):
            drain(engine)
        assert samples[0].finish_reason == "abort"
        for call in (engine.refuse_lost_rank, lambda: run(engine, SNIPPETS[:1], PARAMS[:1])):
            with pytest.raises(RankLost, match="signal 9"):
                call()
