"""A trained head far from its target."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Measure
from head_files import write_eagle3

from pilotfish.bench.features import line_kinds, run_features
from pilotfish.core.features.feature_rows import ITEM_BYTES
from pilotfish.errors import ParameterError
from pilotfish.model.heads.target import TargetFacts


def test_every_line_at_both_temperatures(measure: Measure, llama: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, target=TargetFacts.read(llama), layers=(0, 1, 2))
    results = measure(run_features, "features", draft=head, max_tokens=12, nodes=6, threads=1, kv_slots=512).results
    kinds = line_kinds()
    assert [row["line"] for row in results["lines"]] == [kind.name for kind in kinds] * 2
    for row, kind in zip(results["lines"], kinds * 2, strict=True):
        assert row["tokens"] == 2 * 12 and row["bytes_per_token"] == row["computed_bytes_per_token"]
        assert row["bytes_per_token"] // ITEM_BYTES[kind.dtype] >= 64
        assert row["framed_bytes_per_token"] > row["bytes_per_token"]
    for first in (0, len(kinds)):
        rows = results["lines"][first : first + len(kinds)]
        assert rows[0]["over_local"] == 1 and not rows[0]["resyncs"]


def test_a_draft_that_is_no_head(measure: Measure) -> None:
    with pytest.raises(ParameterError, match=r"^draft: .* expected a trained head"):
        measure(run_features, "features", max_tokens=2)
