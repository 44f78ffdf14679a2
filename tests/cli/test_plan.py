"""`pilotfish plan`: predictions, and the table that holds them against what was published."""

from __future__ import annotations

import json

from pilotfish.plan.published import PUBLISHED, predictions


def test_predictions_are_printed_without_what_was_published(pilotfish) -> None:
    result = pilotfish("plan", "predictions")
    assert (result.code, result.stderr) == (0, "") and json.loads(result.stdout) == predictions()


def test_every_row_is_printed(pilotfish, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = pilotfish("plan", "published").stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(PUBLISHED)]] == list(PUBLISHED)


def test_json_has_every_row_and_the_errors(pilotfish) -> None:
    (record,) = pilotfish("plan", "published", "--json").rows
    assert list(record["rows"]) == list(PUBLISHED)
    row = record["rows"]["trtllm-70b"]
    assert (row["kind"], row["published"]) == ("calibrates", 51.14)
    assert row["error"] == row["predicted"] / row["published"] - 1


def test_splits_are_shown_beside_the_published_best(pilotfish, monkeypatch) -> None:
    from pilotfish.plan.simulation import device_splits
    from pilotfish.plan.simulation.device_splits import SPLITS, SplitCurve, SplitPoint

    curve = SplitCurve(
        0.8, [SplitPoint(n, rate, 3.0, 0.01, 0.002) for n, rate in enumerate((1, 2, 3, 9, 5, 6, 7, 8), 1)]
    )
    monkeypatch.setattr(device_splits, "curves", lambda _table, _done: dict.fromkeys(SPLITS.pairs, curve))
    rows = [line.split() for line in pilotfish("plan", "splits").stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == list(SPLITS.pairs)
    assert (rows[0][-3:], rows[2][-3:]) == (["4+4", "4+4", "+0.0%"], ["4+4", "6+2", "-33.3%"])
    (record,) = pilotfish("plan", "splits", "--json").rows
    assert (record["qwen2-72b"]["published"], record["qwen2-72b"]["best"]) == ([6, 4], 4)
