"""What the cache finds of requests that are replayed, by its size and by what goes first."""

import gzip
import json
from pathlib import Path

import pytest
from sizes import sized
from typer.testing import CliRunner

from pilotfish.bench import app
from pilotfish.bench.eviction import distinct_blocks, hit_rate, tenants
from pilotfish.bench.workload import parse_shares
from pilotfish.errors import ParameterError
from pilotfish.plan.trace import BLOCK_TOKENS, TracedRequest, read_trace

#: Three conversations in turn, each of two turns; the last block of a prompt is not full.
CONVERSATIONS = [TracedRequest(2 * BLOCK_TOKENS - 12, [10 * i, 10 * i + 1]) for i in range(3)]
SECOND_TURNS = [TracedRequest(3 * BLOCK_TOKENS - 100, [10 * i, 10 * i + 1, 10 * i + 2]) for i in range(3)]
TURNS = [*CONVERSATIONS, *SECOND_TURNS]
TOKENS = sum(one.input_length for one in TURNS)


def test_what_was_found_counts_in_tokens() -> None:
    assert hit_rate(TURNS, distinct_blocks(TURNS), 0) == 3 * 2 * BLOCK_TOKENS / TOKENS
    assert hit_rate([CONVERSATIONS[0]] * 2, 10, 0) == 0.5  # no more than its length, though its blocks hold more


def test_a_small_pool_forgets_what_was_used_longest_ago() -> None:
    assert hit_rate(TURNS, 4, 0) == 0  # two conversations, where three take turns
    again = [*CONVERSATIONS[:2], CONVERSATIONS[1]]
    assert hit_rate(again, 4, 0) == 1 / 3


def test_equal_blocks_below_other_salts_are_others() -> None:
    pair = [TracedRequest(BLOCK_TOKENS, [1], salt) for salt in ("a", "b", "a")]
    assert hit_rate(pair, 3, 0) == 1 / 3 and distinct_blocks(pair) == 2


def test_documents_that_nobody_sends_again_do_not_drive_out_what_many_begin_with() -> None:
    """With a share more is found than by LRU in a pool that is too small for all, and as much in one that is not."""
    arrivals = tenants(2000)
    assert hit_rate(arrivals, 400, 0.2) > 1.2 * hit_rate(arrivals, 400, 0)
    everything = distinct_blocks(arrivals)
    assert hit_rate(arrivals, everything, 0.2) == hit_rate(arrivals, everything, 0)


@pytest.mark.parametrize("name", sized(["trace.jsonl.gz"], ["trace.jsonl", "trace.jsonl.gz"]))
def test_a_trace_is_replayed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = "".join(
        json.dumps({"timestamp": 0, "input_length": one.input_length, "hash_ids": one.hash_ids}) + "\n" for one in TURNS
    )
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    assert read_trace(path, TracedRequest) == TURNS
    command = ["eviction", f"--trace={path}", "--capacities=128,1000", "--shares=0,0.5", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout)
    first = report["hit_rates"][0]
    assert first["workload"] == "trace" and first["LRU"] == first["0.5 proven"] == hit_rate(TURNS, 128, 0)
    assert len(report["hit_rates"]) == 4 and report["unlimited"]["trace"] == first["LRU"]


def test_bad_capacities_and_shares() -> None:
    with pytest.raises(ParameterError, match="shares"):
        parse_shares("shares", "0,1.5")
    result = CliRunner().invoke(app, ["eviction", "--capacities=100"])
    assert isinstance(result.exception, ParameterError) and "at least 128" in str(result.exception)
