"""Frames on their way, in a recording, as lines: nothing is changed, and nothing in them gives a terminal orders."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from drafters import Lawful, listening
from frozen_frames import FRAMES
from hypothesis import given
from hypothesis import strategies as st
from test_draft_check import HELLO, QUICK

from pilotfish.cli import main
from pilotfish.wire.conformance.dump import Tap, TappedFrame, described, recorded
from pilotfish.wire.conformance.kit import examine
from pilotfish.wire.endpoints import dialled_endpoint, listening_endpoint
from pilotfish.wire.sockets import DialingChannel

Told = tuple[int, str, str]


@pytest.fixture
def dump(capfd: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def run(*arguments: object) -> Told:
        capfd.readouterr()
        code = main(["draft-dump", *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def test_a_tap_changes_nothing_and_sees_all() -> None:
    seen, stopped = list[TappedFrame](), threading.Event()
    with (
        listening(Lawful) as pool,
        Tap(listening_endpoint("listen", "tcp://127.0.0.1:*"), dialled_endpoint("pool", pool)) as tap,
    ):

        def run() -> None:
            while not stopped.is_set():
                tap.turn(0.02, seen.append)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            dial = lambda incarnation: DialingChannel([tap.endpoint], incarnation)  # noqa: E731
            report = examine(dial, HELLO, QUICK, ["follows-commits", "resyncs-gaps", "keeps-targets-apart"])
        finally:
            stopped.set()
            thread.join()
    assert not report.failed, report.failed
    told = [described(tapped) for tapped in seen]
    assert not any("problem" in one for one in told)
    kinds = {(one["from"], one["type"]) for one in told}
    assert {("target", "hello"), ("target", "open"), ("draft", "tree"), ("draft", "resync")} <= kinds
    assert len({one["target"] for one in told}) == 5  # targets of the kit
    assert [tapped.at for tapped in seen] == sorted(tapped.at for tapped in seen)


def test_a_recording_is_shown(dump: Callable[..., Told], tmp_path: Path) -> None:
    file = tmp_path / "frames.jsonl"
    tapped = [TappedFrame.of(n / 8, "draft" if f.to_target else "target", b"run", f.data) for n, f in enumerate(FRAMES)]
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in tapped))
    assert list(recorded(file)) == tapped
    code, stdout, _ = dump("--file", file, "--json")
    told = [json.loads(line) for line in stdout.splitlines()]
    assert code == 0 and [one["type"] for one in told] == [frame.values["type"] for frame in FRAMES]
    assert not any("problem" in one for one in told)
    (longest,) = [one for one in told if one["type"] == "tree"]
    assert longest["tokens"] == [120, 55, 61, 300] and longest["from"] == "draft"
    lines = dump("--file", file, "--type", "commit", "--type", "tree")[1].splitlines()
    assert ["→ commit" in lines[0], "← tree" in lines[1], len(lines)] == [True, True, 2]
    assert "tokens [120, 61], wanted 512" in lines[0]


@given(st.binary(max_size=60) | st.recursive(st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_whatever_comes_is_one_line_without_commands(content: object) -> None:
    data = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    told = described(TappedFrame.of(0.0, "target", b"\x1b", data))
    text = json.dumps(told, ensure_ascii=False)
    assert text.isprintable() and "problem" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "listen: None"),
        (("--listen", "tcp://127.0.0.1:0"), "pool: None"),
        (("--file", "/nowhere"), "cannot be read"),
        (("--file", "/dev/null", "--pool", "ipc:///x"), "cannot be combined"),
        (("--listen", "nonsense", "--pool", "ipc:///x"), "listen"),
        (("--listen", "tcp://0.0.0.0:7070", "--pool", "ipc:///x"), "of this host alone"),
        (("--listen", "tcp://127.0.0.1:*", "--pool", "tcp://192.0.2.1:7070"), "of this host alone"),
        (("--listen", "tcp://127.0.0.1:*", "--pool", "ipc:///x", "--record", "/nowhere/x"), "cannot be written"),
    ],
)
def test_what_cannot_be(dump: Callable[..., Told], arguments: tuple[str, ...], words: str) -> None:
    code, stdout, stderr = dump(*arguments)
    assert code == 2 and stdout == "" and words in stderr and stderr.count("\n") == 1


def test_a_file_that_is_no_recording(dump: Callable[..., Told], tmp_path: Path) -> None:
    file = tmp_path / "frames.jsonl"
    for line in ("nonsense", "{}", '{"at":1,"sender":"target","target":"00","frame":"%"}'):
        file.write_text(line)
        code, _, stderr = dump("--file", file)
        assert code == 2 and "line 1 is no recorded frame" in stderr


def test_live_until_ctrl_c(tmp_path: Path) -> None:
    record = tmp_path / "frames.jsonl"
    with listening(Lawful) as pool:
        options = ["--listen", "tcp://127.0.0.1:*", "--pool", pool, "--record", str(record), "--json"]
        with subprocess.Popen(
            [sys.executable, "-m", "pilotfish", "draft-dump", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None and process.stdout is not None
            endpoint = process.stderr.readline().split(" on to ")[0].split(" from ")[1]
            examine(lambda own: DialingChannel([endpoint], own), HELLO, QUICK, ["guesses"])
            process.send_signal(signal.SIGINT)
            shown = [json.loads(line) for line in process.stdout.read().splitlines()]
        assert process.returncode == 0
    assert [described(tapped) for tapped in recorded(record)] == shown
    assert {one["type"] for one in shown} >= {"hello", "load", "open", "tree"}
