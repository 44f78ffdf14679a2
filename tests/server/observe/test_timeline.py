"""Timelines: what processes stream, and one file of it in the Trace Event Format."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from forked import ForkedWorker
from support import SNIPPETS, make_engine, run

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.processes import launch
from pilotfish.errors import InputError
from pilotfish.workers import records
from pilotfish.workers.records import LevelRecord, PrefillRecord, StepRecord, Timeline, merge, part_of

STEP = StepRecord(1, 2, 3, 5, 6, 8, 18, 20, 21, 3, 40, 30, 4, 50, 7, 10, 2)
LEVEL = LevelRecord(4.0, 6.5, sessions=2, leaves=16, prompt_rows=0, nodes=64, used=3, wasted=9)


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_a_step_is_a_span_with_its_parts(tmp_path: Path) -> None:
    part = part_of(tmp_path / "trace.json", "target")
    one = Timeline(part, "target")
    one.step(STEP)
    one.close()
    merge([part], tmp_path / "trace.json")
    step, *parts = spans(tmp_path / "trace.json")
    assert (step["name"], step["ts"], step["dur"]) == ("step", 2e6, 19e6)
    assert step["args"]["accepted"] == 7 and step["args"]["misses"] == 1
    assert [(p["name"], p["dur"]) for p in parts] == [
        *(("plan", 1e6), ("draft", 2e6), ("schedule", 1e6), ("rows", 2e6)),
        *(("forward", 10e6), ("verify", 2e6), ("send", 1e6)),
    ]
    assert not part.exists()


def test_processes_stand_side_by_side_and_a_killed_one_leaves_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    parts = [part_of(path, name) for name in ("target", "draft 0", "draft 1")]
    assert len(set(parts)) == 3
    for part in parts[:2]:  # the third never started
        one = Timeline(part, part.name)
        one.forward(LEVEL)
        one.close()
    with parts[1].open("ab") as file:
        file.write(b'{"name":"level","ph":"X"')  # cut off
    merge(parts, path)
    assert [span["args"]["wasted"] for span in spans(path)] == [9, 9]
    names = [e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"]
    assert names == [part.name for part in parts[:2]]


def test_a_prefill_worker_s_forwards_and_leases(tmp_path: Path) -> None:
    one = Timeline(tmp_path / "part", "prefill")
    one.forward(PrefillRecord(2.0, 2.5, handovers=3, rows=512, completed=1))
    one.forward(PrefillRecord(2.5, 3.5, handovers=1, rows=64, completed=1), 0.75)
    released = {"cached": 64, "size": 1 << 20, "outcome": "released"}
    expired = {"cached": 0, "size": 0, "outcome": "expired"}
    one.lease(Mock(ordered=1.0, started=2.0, computed=3.5, ended=4.0, tokens=[1] * 500, **released))
    one.lease(Mock(ordered=1.5, started=None, computed=None, ended=9.5, tokens=[1] * 7, **expired))
    one.close()
    merge([tmp_path / "part"], tmp_path / "trace.json")
    first, second = spans(tmp_path / "trace.json")
    assert (first["name"], first["ts"], first["dur"]) == ("prefill", 2e6, 0.5e6)
    assert first["args"] == {"handovers": 3, "rows": 512, "completed": 1}
    assert second["args"] == {"handovers": 1, "rows": 64, "completed": 1, "taken": 0.75}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    times = [(event["name"], event["ph"], event["ts"] / 1e6) for event in events if event.get("id") == 1]
    assert times == [
        *(("lease", "b", 1.0), ("queued", "b", 1.0), ("queued", "e", 2.0)),
        *(("computing", "b", 2.0), ("computing", "e", 3.5), ("lease", "e", 4.0)),
    ]
    lease, *rest = [event for event in events if event.get("id") == 2]
    assert [(event["name"], event["ph"]) for event in rest] == [("queued", "b"), ("queued", "e"), ("lease", "e")]
    assert lease["args"] == {"tokens": 7, "cached": 0, "size": 0, "outcome": "expired"}


def test_a_part_has_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_EVENTS", 3)  # the process's name is one
    one = Timeline(tmp_path / "part", "draft")
    for _ in range(10):
        one.forward(LEVEL)
    one.close()
    merge([tmp_path / "part"], tmp_path / "trace.json")
    assert len(spans(tmp_path / "trace.json")) == 2


def test_one_file_of_all_processes(llama: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WorkerProcess", ForkedWorker)
    path, params = tmp_path / "trace.json", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    elsewhere = {"mode": "async", "drafter": "lm", "prefill_workers": 1, "prefill_threshold": "4"}
    with make_engine(llama, draft=draft, trace=path, pace="target=5ms", **elsewhere) as engine:
        steps, write = list[StepRecord](), engine.worker.observe
        engine.worker.observe = lambda record: (steps.append(record), write(record))[1]
        run(engine, SNIPPETS[:2], [params, params])
    found = spans(path)
    assert sum(span["name"] == "step" for span in found) == len(steps)
    assert any(span["name"] == "level" and span["args"]["nodes"] > 0 for span in found)
    assert any(span["name"] == "prefill" and span["args"]["rows"] > 0 for span in found)
    leases = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "lease"]
    assert [event["ph"] for event in leases] == ["b", "e"] * 2
    assert len({span["pid"] for span in found}) == 3 and list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_not_there_is_refused_first(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trace"):
        make_engine(llama, trace=tmp_path / "none" / "trace.json")
