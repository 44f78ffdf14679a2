"""Plans of the documentation run as they are; situations and traces that make no sense are refused in one line."""

import gzip
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import InputError, ParameterError
from pilotfish.plan.planner.choice import choose
from pilotfish.plan.planner.situation import situation_of
from pilotfish.plan.trace import TimedRequest, read_trace

PLANS = Path(__file__).parents[2] / "docs" / "plans"
PAGE = PLANS.parent / "hardware-plans.md"
RECORD: dict[str, Any] = {
    "target": "llama-3.1-8b",
    "devices": [{"name": "h100"}],
    "drafts": [{"model": "llama-3.2-1b", "rate": 0.7}],
    "workload": {"requests": [{"prompt": 100, "output": 10}], "users": 1},
}


def one_line(why: str) -> str:
    return rf"\A.*(?:{why}).*\Z"


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.stem)
def test_plans_of_the_documentation(path: Path) -> None:
    choice = choose(situation_of(tomllib.loads(path.read_text()), path.name))
    assert choice.chosen.serves and {"off"} < {one.deployment.kind for one in choice.kinds}
    assert choice.crossovers and choice.sensitivity
    assert all(one.token_cost is not None and one.joules is not None for one in choice.kinds)
    assert path.name in PAGE.read_text()


def test_the_page_says_what_its_example_says() -> None:
    path, page = PLANS / "one-h200-llama-70b.toml", PAGE.read_text()
    for one in choose(situation_of(tomllib.loads(path.read_text()), path.name)).kinds:
        assert one.token_cost is not None
        cost = f"{one.token_cost.low:.2f}-{one.token_cost.high:.2f}"
        speed = f"{one.point.speed:.1f} | {one.point.tokens:.0f}{'' if one.serves else ' (short)'}"
        assert f"| {one.deployment.kind} |" in page and f"| {speed} |" in page and f"| {cost} |" in page


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"target": "llama-3.1-80b"}, "target: 'llama-3.1-80b' is not allowed; .* nearest: llama-3.1-8b"),
        ({"devices": [{"name": "h300"}]}, "devices: 'h300' is not allowed; .* nearest: "),
        ({"devices": [{"name": "h100"}, {"name": "H100"}]}, "one device or more, each named once"),
        ({"devices": [{"name": "h100", "price": [3.0, 2.0]}]}, "price: .* the lowest first"),
        ({"drafts": [{"model": "llama-3.2-2b"}]}, "draft: 'llama-3.2-2b' is not allowed; .* nearest: llama-3.2-"),
        ({"drafts": [{"model": "llama-3.2-1b"}]}, "its acceptance by llama-3.1-8b; nothing published is known"),
        ({"drafts": [{"model": "llama-3.2-1b", "rate": 1.5}]}, "acceptance: 1.5 is not allowed"),
        ({"drafts": [{"model": "llama-3.2-1b", "trees": [{"nodes": 2, "levels": 3, "gained": 1}]}]}, "acceptance: "),
        ({"link": "rope"}, "link: 'rope' is not allowed; .* nearest: "),
        ({"objective": "beauty"}, "Invalid enum value 'beauty'"),
        ({"color": 1}, "unknown field `color`"),
        ({"limits": {"tpot": 0}}, "tpot: 0.* is not allowed"),
        ({"workload": {"requests": [{"prompt": 0, "output": 1}], "users": 1}}, "a prompt and an output of a token"),
        ({"workload": {"requests": [{"prompt": 1, "output": 1}]}}, "either a rate or users"),
        ({"workload": {"requests": [{"prompt": 1, "output": 1}], "users": 1, "shared": 1.0}}, "shared: 1.0"),
    ],
)
def test_bad_situations(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=one_line(why)):
        situation_of({**RECORD, **changed}, "plan.toml")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"target": "llama-3.1-70b"}, "than 1 h100: 69.1 GB of the weights in bf16 do not fit .* 2 or more"),
        ({"devices": [{"name": "rubin"}]}, "a device whose peak for bf16 is known"),
        ({"placements": [{"on": "h100x2"}]}, "placements: 'h100x2' .* devices that the plan has"),
        ({"placements": [{"on": "h100", "tier": {"name": "hbm9", "kv": 0.1}}]}, "tier: 'hbm9' is not allowed"),
        ({"placements": [{"on": "h100", "tier": {"name": "hbf", "kv": 0.1}}]}, "memory that can be written"),
        ({"placements": [{"on": "h100", "tier": {"name": "mine", "memory": 1e9}}]}, "memory and bandwidth"),
        ({"placements": [{"on": "h100", "ffn_on": "h100", "ffn_link": "rope"}]}, "ffn_link: 'rope' is not allowed"),
        ({"placements": [{"on": "h100", "ffn_on": "h100", "tier": {"name": "host", "kv": 0.1}}]}, "not both"),
        ({"workload": {"requests": [{"prompt": 10**8, "output": 1}], "users": 1}}, "'requests of 100000001 tok"),
    ],
)
def test_situations_that_cannot_be(changed: dict[str, Any], why: str) -> None:
    drafts: dict[str, Any] = {"drafts": []}
    with pytest.raises(ParameterError, match=one_line(why)):
        choose(situation_of({**RECORD, **drafts, **changed}, "plan.toml"))


# -- recorded traffic


TIMED = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'


def test_a_timed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(2 * TIMED)
    assert read_trace(path) == 2 * [TimedRequest(27482, 6955, 52, [46, 47])]


BAD = [(line, "") for line in ("", "[]", '{"input_length": 1}', TIMED.replace("6955", "0"), "{")]
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
BAD += [(TIMED.replace(one, "other"), f" .*`{one}`") for one in FIELDS]


@pytest.mark.parametrize(("line", "field"), BAD)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TIMED + line + "\n")
    with pytest.raises(InputError, match=one_line(rf"trace\.jsonl:2 is not allowed{field}")):
        read_trace(path)


def test_traces_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "plain.gz").write_text("{}")
    (tmp_path / "garbage.gz").write_bytes(gzip.compress(TIMED.encode())[:10] + b"\xff" * 20)
    cannot = [(name, "cannot be read") for name in ("none", "plain.gz", "garbage.gz")]
    for name, why in (*cannot, ("empty.jsonl", "no rows")):
        with pytest.raises(InputError, match=why):
            read_trace(tmp_path / name)
