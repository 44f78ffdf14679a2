"""Drafts of one target against each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Measure

from pilotfish.bench.heads import run_heads


def test_drafts_of_one_target(measure: Measure, llama: Path, draft: Path) -> None:
    both = f"{draft},{llama}"  # the target is the best draft that there can be
    results = measure(run_heads, "heads", drafts=both, max_tokens=12, levels=3, nodes=6, threads=1, target_ms=2).results
    assert results["level_ms"].keys() == {draft.name, llama.name} and min(results["level_ms"].values()) > 0
    names = [f"{draft.name}", f"{draft.name}+ngram"] * 2 + ["ngram"] * 2 + [f"{llama.name}", f"{llama.name}+ngram"] * 2
    assert [row["drafter"] for row in results["equal_cost"]] == names
    assert all(row["tokens"] == 2 * 12 and row["levels"] >= 1 for row in results["equal_cost"])
    assert [row["draft"] for row in results["shapes"]] == [draft.name] * 2 + [llama.name] * 2
    for row in results["shapes"]:
        assert row["ratio"] == pytest.approx(row["tree"] / row["chain"]) and 1 <= row["chain"] <= 7
    assert [row["draft"] for row in results["paced"]] == [draft.name] * 2 + [llama.name] * 2
    assert all(row["equal_outputs"] == 1 and row["tokens_per_verify_step"] >= 1 for row in results["paced"])
    assert results["shapes"][2]["chain"] == 4, "all is accepted: 12 tokens in steps of 1, 7 and 4"
