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
