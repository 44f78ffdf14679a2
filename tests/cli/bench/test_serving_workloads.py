"""What `bench serve` sends, and when: generators, files, traces, loads."""

import gzip
import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from command_runs import write_rows

from pilotfish.cli.bench.serving.loads import arrival_times, burst_times, loads_of, times_of
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.requests import RequestSession, joined
from pilotfish.cli.bench.serving.texts import TextMaker, load_counter
from pilotfish.cli.bench.serving.workloads import SHAPES, parts_of, sessions_of, take_sessions
from pilotfish.errors import InputError, ParameterError, PromptError

TOKENIZER = load_counter("")
URL = "http://127.0.0.1:1"


def options(**given: Any) -> ServeBenchOptions:
    return ServeBenchOptions(**{"base_url": URL, "prompt_tokens": 60, **given})


def first(number: int, **given: Any) -> list[RequestSession]:
    return list(islice(sessions_of(options(**given), TOKENIZER), number))


def tokens(text: str) -> int:
    return len(TOKENIZER.encode(text).ids)


# -- generators


@pytest.mark.parametrize("name", SHAPES)
def test_a_seed_gives_the_same_sessions_each_time(name: str) -> None:
    assert first(3, workload=name) == first(3, workload=name)
    assert first(3, workload=name) != first(3, workload=name, seed=1)


@pytest.mark.parametrize("name", SHAPES)
def test_lengths_are_as_options_say(name: str) -> None:
    for session in first(4, workload=name, prompt_tokens=200, answer_tokens=17, spread=0.0):
        text = joined(session.turns[0].messages)
        assert 195 <= tokens(text) <= (700 if name == "agents" else 265)  # with instructions, and schemas of tools
        assert {turn.max_tokens for turn in session.turns} == {17}


def test_lengths_vary_within_their_spread() -> None:
    maker = TextMaker(TOKENIZER, (0,))
    lengths = [maker.length(100, 0.3) for _ in range(300)]
    assert min(lengths) >= 70 and max(lengths) <= 130 and max(lengths) - min(lengths) > 40
    assert tokens(maker.take(50)) == pytest.approx(50, abs=2)


def test_sessions_do_not_begin_alike_but_agents_share_their_system_prompt() -> None:
    chats = [joined(one.turns[0].messages) for one in first(20, workload="sessions")]
    assert len({text[:100] for text in chats}) == 20
    agents = first(5, workload="agents")
    assert len({one.turns[0].messages[0]["content"] for one in agents}) == 1
    assert len({one.turns[0].messages[1]["content"] for one in agents}) > 1
    assert all(turn.messages[0]["role"] == "user" for one in agents for turn in one.turns[1:])


def test_structured_replies_have_a_schema() -> None:
    for name in ("json", "agents"):
        (session,) = first(1, workload=name)
        assert session.turns[0].fields["response_format"]["json_schema"]["schema"]["type"] == "object"


def test_a_mix_has_its_weights() -> None:
    found = first(300, workload="chat:3,json:1", prompt_tokens=10)
    chats = sum(one.turns[0].category == "chat" for one in found)
    assert 195 <= chats <= 255
    assert [part.weight for part in parts_of(options(workload="chat:3,json:1"))] == [3, 1]
    assert len({turn.seed for one in found for turn in one.turns}) == 300


@pytest.mark.parametrize("workload", ["", "poem", "chat:0", "chat:x", "chat:inf", "chat,,json"])
def test_workloads_that_there_are_not(workload: str) -> None:
    with pytest.raises(ParameterError, match="NAME:WEIGHT of code, chat"):
        parts_of(options(workload=workload))


def test_turns_of_options_are_for_workloads_that_have_some() -> None:
    assert [len(first(1, workload=name, turns=3)[0].turns) for name in ("sessions", "agents", "chat")] == [3, 3, 1]
    taken = take_sessions(sessions_of(options(workload="sessions"), TOKENIZER), 7)
    assert [len(one.turns) for one in taken] == [5, 5]


# -- files


def test_a_prompt_file_is_sent_again_under_other_ids(tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "a"}, {"id": "b", "turns": ["x", "y"], "category": "code"}]
    found = first(3, prompts=write_rows(tmp_path / "p.jsonl", *rows), ignore_eos=True, answer_tokens=None)
    assert [turn.id for one in found for turn in one.turns] == ["1", "b.0", "b.1", "1#1"]
    assert found[0].turns[0].messages[0]["content"] == "a" and found[1].turns[1].category == "code"
    assert found[1].turns[0].fields == {"ignore_eos": True} and found[0].turns[0].seed != found[2].turns[0].seed


@pytest.mark.parametrize(
    ("source", "text", "said"),
    [
        ("prompts", '{"id": 1}\n', "p.jsonl:1: row: exactly one of prompt and turns"),
        ("prompts", '{"id": 1, "prompt": "a"}\n{\n', "p.jsonl:2: row: it is not JSON"),
        ("prompts", '{"id": 1, "prompt": ""}\n', "p.jsonl:1: a text is empty"),
        ("prompts", "", "no rows"),
        ("trace", '{"input_length": 9, "output_length": 3, "hash_ids": [1]}\n', "p.jsonl:1 is not .*`timestamp`"),
    ],
)
def test_files_that_cannot_be_sent(tmp_path: Path, source: str, text: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises((InputError, PromptError), match=rf"\A.*{said}.*\Z"):
        first(1, **{source: path})


# -- traces


def line(at: float, length: int, *hashes: int, answer: int = 3) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": answer, "hash_ids": hashes}


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_equal_blocks_of_a_trace_are_equal_texts(tmp_path: Path, name: str) -> None:
    rows = [line(0, 1024, 1, 2), line(500, 1536, 1, 2, 3), line(1000, 700, 1, 4)]
    path = tmp_path / name
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    one, two, three = (session.turns[0].messages[0]["content"] for session in first(9, trace=path, block_tokens=64))
    assert two.startswith(one) and tokens(one) == pytest.approx(128, abs=4)
    assert not three.startswith(one) and three[: len(one) // 3] == one[: len(one) // 3]
    assert tokens(three) == pytest.approx(700 * 64 / 512, abs=6)


def test_a_trace_says_when(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", line(1000, 9, 1), line(3000, 9, 1, answer=512))
    asked = options(trace=path, speedup=4.0, block_tokens=16)
    found = list(sessions_of(asked, TOKENIZER))
    (load,) = loads_of(asked)
    times = times_of(load, found, asked)
    assert times == [0.0, 0.5] and load.named(times) == {"rate": 4.0}
    assert [one.turns[0].max_tokens for one in found] == [1, 16]
    assert loads_of(options(trace=path, concurrencies="2"))[0].concurrency == 2


def test_one_source_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="either --prompts or --trace"):
        first(1, prompts=tmp_path, trace=tmp_path)


# -- loads


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_their_mean_and_their_shape(burstiness: float) -> None:
    times = islice(arrival_times(5.0, 3, burstiness), 4000)
    found = [later - sooner for sooner, later in pairwise(times)]
    mean = sum(found) / len(found)
    variance = sum((one - mean) ** 2 for one in found) / len(found)
    assert mean == pytest.approx(0.2, rel=0.1)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.25)  # 1 of a Poisson process


def test_bursts_keep_the_rate_and_their_pauses() -> None:
    times = list(islice(burst_times(4.0, options(burst_on=1.0, burst_off=3.0)), 2000))
    assert all(at % 4.0 < 1.0 for at in times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.1)


def test_loads_come_one_after_the_other() -> None:
    assert [one.concurrency for one in loads_of(options(concurrencies="1,8"))] == [1, 8]
    assert [one.rate for one in loads_of(options(rates="0.5,2"))] == [0.5, 2.0]
    assert [one.concurrency for one in loads_of(options())] == [1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rates": "1", "concurrencies": "1"}, "either --concurrency or --rate"),
        ({"rates": "0"}, "sessions a second"),
        ({"rates": "fast"}, "sessions a second"),
        ({"concurrencies": "0"}, "positive integers"),
        ({"burst_on": 1.0}, "--burst-on and --burst-off together"),
    ],
)
def test_loads_that_there_are_not(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        loads_of(options(**given))


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"a tokenizer\.json"):
        load_counter(str(tmp_path / "none"))
