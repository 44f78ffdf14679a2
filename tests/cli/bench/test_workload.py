"""Prompt files, settings, shards, models."""

import json
from pathlib import Path

import pytest

from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.parity import PARITY_SETTINGS, mixed_jobs
from pilotfish.cli.bench.workload import Prompt, load_prompts, parse_numbers
from pilotfish.engine.pairs import PairDirs
from pilotfish.errors import InputError

PROMPTS = [Prompt(str(index), f"text {index}") for index in range(6)]


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": 7, "turns": ["a\\n", "b"], "other": 1}\n\n{"id": "x", "prompt": "☃"}\n')
    assert load_prompts(path) == [Prompt("7", "a\nb"), Prompt("x", "☃")]
    assert load_prompts(path, limit=1) == [Prompt("7", "a\nb")]


def test_a_bad_row_is_named_in_one_line(tmp_path: Path) -> None:
    """`bench serve` reads the same rows: test_serving_workloads.py has other bad ones."""
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": 0, "turns": ["good"]}) + "\n" + json.dumps({"id": 1, "turns": [""]}) + "\n")
    with pytest.raises(InputError, match=r"p\.jsonl:2: ") as raised:
        load_prompts(path)
    assert "\n" not in str(raised.value)
    assert len(load_prompts(path, limit=1)) == 1


def test_mixed_jobs_hold_every_pair_once_and_mix_settings() -> None:
    jobs = mixed_jobs(PROMPTS, PARITY_SETTINGS, 8)
    assert len({(job.prompt.id, job.setting) for job in jobs}) == len(jobs) == len(PROMPTS) * len(PARITY_SETTINGS)
    assert len({job.setting for job in jobs[:4]}) == 4
    assert all(len({job.setting for job in jobs[at : at + 4]}) >= 3 for at in range(len(jobs) - 3))
    seeds = {(job.prompt.id, job.params.seed) for job in jobs}
    assert len(seeds) == len(PROMPTS)  # one seed for each prompt, whatever the setting


def test_shards_part_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": prompt.id, "prompt": prompt.text}) + "\n" for prompt in PROMPTS))

    def rows(shard: str) -> list[Prompt]:
        return BenchOptions(prompts=path, shard=shard).rows()

    parts = [rows(f"{index}/4") for index in (1, 2, 3, 4)]
    assert sorted((p for part in parts for p in part), key=lambda p: p.id) == PROMPTS
    assert rows("1/1") == PROMPTS
    for bad in ("0/2", "3/2", "2", "a/b", "1/", "-1/2", "1/7"):
        with pytest.raises(InputError, match="shard"):
            rows(bad)


def test_numbers() -> None:
    assert parse_numbers("threads", "1,2") == [1, 2]
    for bad in ("", "0", "1,,2", "x", "1.5", "-1"):
        with pytest.raises(InputError, match="threads"):
            parse_numbers("threads", bad)


def test_models_come_from_a_pair_or_from_two_directories(tmp_path: Path) -> None:
    assert BenchOptions(target=tmp_path, draft=tmp_path).models() == PairDirs(tmp_path, tmp_path)
    with pytest.raises(InputError, match="pair"):
        BenchOptions(pair="pycode", target=tmp_path, draft=tmp_path).models()
    with pytest.raises(InputError, match="draft"):
        BenchOptions(target=tmp_path).models()
    with pytest.raises(InputError, match="target"):
        BenchOptions(draft=tmp_path).models()
    with pytest.raises(InputError, match="pair"):
        BenchOptions(pair="nothing").models()
