"""Other engines beside ours on tiny models; no test says how fast."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Measure
from peer_doubles import start_inline

from pilotfish.bench import compare
from pilotfish.bench.compare import INSTALL, LIBRARIES, converted_setup, parse_temperatures, run_compare
from pilotfish.bench.comparison import PILOTFISH, TRANSFORMERS, Contender, ratios_of, speed_row
from pilotfish.bench.forwards import QUANTIZATIONS
from pilotfish.bench.peers import pilotfish_peer, transformers_peer
from pilotfish.bench.peers.protocol import LOOKUP, PLAIN, Generated, LoadedPeer, PeerSetup, Question, answer_all
from pilotfish.bench.report import ProgressBar
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Quantization
from pilotfish.config.text import config_text
from pilotfish.errors import EngineError, ParameterError, PromptError

TINY = {"threads": 1, "max_tokens": 6, "repeats": 1, "modes": "off,sync", "levels": 3}


@pytest.fixture
def _inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers run in this process, and the extra is not installed."""
    monkeypatch.setattr(compare, "start_peer", start_inline)
    monkeypatch.setattr(compare, "find_spec", lambda _: None)


@pytest.mark.usefixtures("_inline")
def test_compare(measure: Measure) -> None:
    results = measure(run_compare, "compare", temperatures="0,0.8", **TINY).results
    greedy, sampled = (
        {row["contestant"]: row for row in results["speeds"] if row["temperature"] == t} for t in (0, 0.8)
    )
    assert list(greedy) == [
        *pilotfish_peer.DRAFTERS,
        TRANSFORMERS,
        f"{TRANSFORMERS}, {LOOKUP}",
        f"{TRANSFORMERS}, assisted",
    ]
    assert greedy.keys() - sampled.keys() == {f"{TRANSFORMERS}, {LOOKUP}"}
    assert all(row["tokens"] == 12 and row["tokens_per_second"].count == 2 for row in results["speeds"])
    assert all(row["equal_to_plain"] == row["as_transformers"].minimum == 1 for row in greedy.values())
    assert sampled["sync"]["equal_to_plain"] == 1 and "equal_to_plain" not in sampled[TRANSFORMERS]
    assert greedy["off"]["tokens_per_verify_step"] == 1 and greedy[TRANSFORMERS]["tokens_per_verify_step"] is None
    assert {row["precision"] for row in results["contestants"]} == {"float32"}
    reasons = {row["contestant"]: row["reason"] for row in results["left_out"]}
    assert reasons["llama.cpp"] == f"llama-cpp-python and gguf not installed: {INSTALL}"
    assert reasons["OpenVINO GenAI"] == f"openvino-genai and gguf not installed: {INSTALL}"
    assert "temperature 0" in reasons[f"{TRANSFORMERS}, {LOOKUP}"]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_contestants_agree_on_what_is_generated(config: EngineConfig, quantization: Quantization) -> None:
    """Greedy outputs of ours and of transformers are the same work, not only the same length."""
    ours = pilotfish_peer.load(config_text(replace(config, quantization=quantization)))
    setup = PeerSetup(
        target=str(config.target), draft=str(config.draft), threads=1, dtype="float32", quantization=quantization
    )
    theirs = transformers_peer.load(setup.text)
    assert (quantization in theirs.precision) == (quantization in ours.precision) == (quantization != "none")
    question = Question(prompt=list(range(1, 12)), max_tokens=6)
    outputs = [tuple(way(question).tokens) for peer in (ours, theirs) for way in peer.ways.values()]
    assert len(set(outputs)) == 1 and len(outputs[0]) == 6 and len(outputs) == 7


def generated(*seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6)) -> list[Generated]:
    return [Generated(seconds=spent, tokens=list(tokens)) for spent in seconds]


def test_figures() -> None:
    """The best of the ways to guess is one for all rounds; the better of it and plain is chosen in each."""
    ways = [(PILOTFISH, "off"), (PILOTFISH, "sync"), (TRANSFORMERS, PLAIN), ("other", PLAIN), ("other", "draft")]
    contenders = [Contender(engine, way, "", samples=True) for engine, way in [*ways, ("other", "draft of 3")]]
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
    peer = LoadedPeer({PLAIN: lambda asked: Generated(seconds=1.0, tokens=asked.prompt)}, "exact", left_out={"b": "c"})
    said = io.BytesIO()
    answer_all(peer, io.BytesIO(b'{"way": "plain", "prompt": [4, 2], "max_tokens": 1}\n'), said)
    ready, answer = map(json.loads, said.getvalue().splitlines())
    assert ready == {"ways": [PLAIN], "precision": "exact", "sampling": [], "left_out": {"b": "c"}}
    assert answer == {"seconds": 1.0, "tokens": [4, 2], "verify_steps": 0}


def test_what_a_library_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reason is one line; nothing is left out in silence."""
    progress, library = ProgressBar(), LIBRARIES["llama.cpp"]
    setup = PeerSetup(target="t", draft="d", threads=1, dtype="bfloat16")
    monkeypatch.setattr(compare, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(EngineError, match=r"^gguf not installed: pip install"):
        converted_setup(library, setup, progress)
    monkeypatch.setattr(compare, "find_spec", lambda name: name)
    with pytest.raises(EngineError, match=r"^weights of int8 are torchao's"):
        converted_setup(
            library, PeerSetup(target="t", draft="d", threads=1, dtype="float32", quantization="int8"), progress
        )
    writer = SimpleNamespace(gguf_of=lambda model, weights: Path(f"{model}-{weights}"))
    monkeypatch.setitem(sys.modules, "pilotfish.model.backends.gguf_file", writer)
    converted = converted_setup(library, setup, progress)
    assert (converted.target, converted.draft) == ("t-bf16", "d-bf16")
    monkeypatch.setattr(compare, "is_head", lambda _: True)
    assert converted_setup(LIBRARIES["openvino"], setup, progress).draft is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"peers": "vllm"}, "peers"),
        ({"temperatures": "0,x"}, "temperatures"),
        ({"modes": "on"}, "modes"),
        ({"guesses": "0"}, "guesses"),
    ],
)
def test_bad_options(measure: Measure, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ParameterError, match=f"^{named}: "):
        measure(run_compare, "compare", **{**TINY, **given})


def test_a_prompt_without_room_for_its_output(measure: Measure) -> None:
    with pytest.raises(PromptError, match=r"^prompt own/0: \d+ tokens and 9999 new ones exceed"):
        measure(run_compare, "compare", **{**TINY, "max_tokens": 9999})


@pytest.mark.parametrize("text", ["", "-1", "nan", "0,,1", "101"])
def test_no_temperatures(text: str) -> None:
    with pytest.raises(ParameterError):
        parse_temperatures(text)
