"""Other engines beside ours on tiny models; no test says how fast."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from peers import pilotfish_peer, transformers_peer
from peers.comparison import PILOTFISH, TRANSFORMERS, Contender, ratios_of, speed_row
from peers.protocol import PLAIN, Generated, LoadedPeer, PeerSetup, Question, answer_all

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Quantization
from pilotfish.config.text import config_text


@pytest.mark.parametrize("quantization", ("none", "int8"))
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
