"""The bench of grammars, over a few of the corpus."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pilotfish.bench import grammar
from pilotfish.bench.corpus import entries
from pilotfish.bench.grammar import SHAPES, Bed, run_grammar
from pilotfish.bench.options import BENCHES
from pilotfish.bench.report import ProgressBar
from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import InputError

TOKENIZER = resolve_pair("pycode").target / "tokenizer.json"


def test_what_grammars_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "entries", lambda: list(entries())[::20])
    bench, progress = BENCHES["grammar"], ProgressBar()
    options = bench.options(repeats=2, tokenizer=str(TOKENIZER))
    report = replace(run_grammar(options, progress), conditions=bench.conditions(options))
    assert progress.tasks[0].completed == progress.total
    report.show()
    found = report.results
    assert {row["of"]: row["number"] for row in found["compiling_ms"]} == {"schema": 7, "regex": 1, "grammar": 1}
    assert {row["what"] for row in found["tokens_us"]} == {"mask", "consume", "take back", "fork"}
    rows = {(row["tree"], row["threads"]): row for row in found["masks_of_trees_ms"]}
    assert rows.keys() == {(shape, threads) for shape in SHAPES for threads in (1, 2)}
    assert all(row["number"] > 0 and row["mean"] == pytest.approx(10 * row["mean_of_10_ms"]) for row in rows.values())


def test_trees_are_legal_and_of_their_shape() -> None:
    from transformers import AutoTokenizer

    bed, rng = Bed(AutoTokenizer.from_pretrained(TOKENIZER.parent)), random.Random(1)
    for planted in bed.planted(bed.entries[0], rng):
        state = bed.state(planted.entry, planted.committed)
        depths = [0]
        for parent in SHAPES[planted.shape]:
            depths.append(depths[parent + 1] + 1)
        assert [len(path) for path in planted.paths] == depths
        assert len(set(planted.paths)) == 17 and all(state.allows(path) for path in planted.paths[1:])


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is no file; expected a tokenizer\.json"):
        run_grammar(BENCHES["grammar"].options(tokenizer=str(tmp_path / "none.json")), ProgressBar())
