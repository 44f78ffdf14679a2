"""Other engines beside ours on tiny models; no test says how fast."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from command_runs import Measure
from msgspec.structs import replace

from pilotfish.cli.bench.compare import compare, pilotfish_peer
from pilotfish.cli.bench.compare.compare import INSTALL, LIBRARIES, converted, run_compare
from pilotfish.cli.bench.compare.figures import PILOTFISH, TRANSFORMERS, Contender, headline, ratios_of, speed_row
from pilotfish.cli.bench.compare.peer import (
    LOOKUP,
    PLAIN,
    Generated,
    LoadedPeer,
    PeerReady,
    PeerSetup,
    Question,
    answer_all,
)
from pilotfish.cli.bench.report import Spread
from pilotfish.errors import EngineError, PromptError

TINY = {"threads": 1, "max_tokens": 6, "repeats": 1, "modes": "off,sync", "levels": 3}


class InlinePeer:
    """Stands in for the process of a peer."""

    def __init__(self, engine: str, module: str, setup: str, cores: object) -> None:  # noqa: ARG002
        self.peer: LoadedPeer = importlib.import_module(f"pilotfish.cli.bench.compare.{module}").load(setup)
        self.ready: PeerReady = self.peer.ready

    def ask(self, way: str, question: Question) -> Generated:
        return self.peer.ways[way](question)

    def __enter__(self) -> InlinePeer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers run in this process, and the extra is not installed."""
    monkeypatch.setattr(compare, "Peer", InlinePeer)
    monkeypatch.setattr(compare, "find_spec", lambda _: None)


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_compare(measure: Measure, tmp_path: Path, temperature: float) -> None:
    """Greedy outputs of ours and of transformers are the same work, not only the same length."""
    chart = tmp_path / "chart.svg"
    results = measure(run_compare, "compare", temperature=temperature, svg=chart, **TINY).results
    speeds = {row["contestant"]: row for row in results["speeds"]}
    lookup = [] if temperature else [f"{TRANSFORMERS}, {LOOKUP}"]
    assert [*speeds] == [*pilotfish_peer.DRAFTERS, TRANSFORMERS, *lookup, f"{TRANSFORMERS}, assisted"]
    assert all(row["tokens"] == 12 and row["tokens_per_second"].count == 2 for row in speeds.values())
    if temperature:
        assert speeds["sync"]["equal_to_plain"] == 1 and "equal_to_plain" not in speeds[TRANSFORMERS]
    else:
        assert all(row["equal_to_plain"] == row["as_transformers"].minimum == 1 for row in speeds.values())
    assert speeds["off"]["tokens_per_verify_step"] == 1 and speeds[TRANSFORMERS]["tokens_per_verify_step"] is None
    assert {row["precision"] for row in results["contestants"]} == {"float32"}
    reasons = {row["contestant"]: row["reason"] for row in results["left_out"]}
    assert reasons["llama.cpp"] == f"llama-cpp-python and gguf not installed: {INSTALL}"
    assert reasons["OpenVINO GenAI"] == f"openvino-genai and gguf not installed: {INSTALL}"
    assert ("temperature 0" in reasons.get(f"{TRANSFORMERS}, {LOOKUP}", "")) == (temperature > 0)
    assert {f"{PILOTFISH}, off", TRANSFORMERS} <= {one.text for one in ElementTree.parse(chart).iter()}


def test_what_a_library_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of its own format, made of the same weights in the precision nearest to ours."""
    setup = PeerSetup(target="t", draft="d", threads=1, dtype="bfloat16")
    monkeypatch.setattr(compare, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(EngineError, match=r"^gguf not installed: pip install"):
        converted(LIBRARIES["llama.cpp"], setup)
    assert converted(LIBRARIES["transformers"], setup) == setup
    monkeypatch.setattr(compare, "find_spec", lambda name: name)
    writer = SimpleNamespace(gguf_of=lambda model, weights: Path(f"{model}-{weights}"))
    monkeypatch.setitem(sys.modules, "pilotfish.model.backends.gguf_file", writer)
    own = converted(LIBRARIES["llama.cpp"], setup)
    assert (own.target, own.draft) == ("t-bf16", "d-bf16")
    headed = converted(LIBRARIES["openvino"], replace(setup, draft=None))
    assert (headed.target, headed.draft) == ("t-f16", None)


def test_a_prompt_without_room_for_its_output_is_refused(measure: Measure) -> None:
    with pytest.raises(PromptError, match=r"^prompt own/0: \d+ tokens and 9999 new ones exceed"):
        measure(run_compare, "compare", **{**TINY, "max_tokens": 9999})


def generated(*seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6)) -> list[Generated]:
    return [Generated(seconds=spent, tokens=list(tokens)) for spent in seconds]


def test_figures() -> None:
    """The best of the ways to guess is one for all rounds; the better of it and plain is chosen in each."""
    ways = [(PILOTFISH, "off"), (PILOTFISH, "sync"), (TRANSFORMERS, PLAIN), ("other", PLAIN), ("other", "draft")]
    contenders = [Contender(engine, way, "") for engine, way in [*ways, ("other", "draft of 3")]]
    field = {one.name: one for one in contenders}
    rounds = {
        **{name: generated(3.0, 2.0, 1.0) for name in ("off", "sync", TRANSFORMERS)},
        "other": [*generated(3.0, 8.0), *generated(6.0, tokens=(1, 2, 0, 4, 5, 6))],
        "other, draft": generated(9.0, 9.0, 1.0),
        "other, draft of 3": generated(6.0, 4.0, 4.0),
    }
    ratios = {(row["numerator"], row["denominator"]): row["ratio"] for row in ratios_of(field, rounds)}
    better = "other, better of plain and draft of 3"
    assert {below for _, below in ratios} == {TRANSFORMERS, "other", "other, draft of 3", better}
    assert ratios["off", "other"].median == 4 and ratios["off", "other, draft of 3"].median == 2
    best = ratios["sync", better]
    assert (best.minimum, best.median, best.maximum) == (1, 2, 4)
    row = speed_row(field["other"], rounds, greedy=True)
    assert (row["as_transformers"].minimum, row["as_transformers"].maximum) == (2 / 6, 1)
    assert (row["seconds"], row["tokens"], row["over_off"].median) == (17, 18, 0.25)
    assert speed_row(field["other, draft"], rounds, greedy=True)["equal_to_plain"] == 2 / 3


def test_a_peer_tells_what_it_can_and_answers_each_line() -> None:
    peer = LoadedPeer({PLAIN: lambda asked: Generated(seconds=1.0, tokens=asked.prompt)}, "exact")
    said = io.BytesIO()
    answer_all(peer, io.BytesIO(b'{"way": "plain", "prompt": [4, 2], "max_tokens": 1}\n'), said)
    ready, answer = map(json.loads, said.getvalue().splitlines())
    assert ready == {"ways": [PLAIN], "precision": "exact", "sampling": []}
    assert answer == {"seconds": 1.0, "tokens": [4, 2], "verify_steps": 0}


def test_bars_stand_by_speed_and_ours_in_colour() -> None:
    speeds = {"off": 40.0, "async": 80.5, TRANSFORMERS: 20.0, "<llama> & co": 30.0}
    rows = [{"contestant": name, "tokens_per_second": Spread.of([speed])} for name, speed in speeds.items()]
    engines = [{"contestant": name, "engine": PILOTFISH if name in ("off", "async") else name} for name in speeds]
    drawn = headline({"speeds": rows, "contestants": engines})
    bars = [(one.get("class"), float(str(one.get("width")))) for one in drawn.iter() if one.get("rx")]
    assert [style for style, _ in bars] == ["ours", "plain", "other", "other"]
    widths = [width for _, width in bars]
    assert widths == pytest.approx([widths[0] * speed / 80.5 for speed in (80.5, 40, 30, 20)], rel=0.01)
