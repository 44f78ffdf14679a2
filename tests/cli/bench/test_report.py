"""Figures, tables and JSON; the machine; prompt files, settings, shards, models."""

import json
from pathlib import Path

import pytest
import torch
from command_runs import write_rows

from pilotfish.cli.bench import report as report_module
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.parity import PARITY_SETTINGS, mixed_jobs
from pilotfish.cli.bench.report import Report, Spread, cpu_name, describe_machine, distinct_ngrams, matmul_probe, ratios
from pilotfish.cli.bench.workload import Prompt, load_prompts, parse_numbers
from pilotfish.engine.pairs import PairDirs
from pilotfish.errors import InputError
from pilotfish.model.loading import precision


def test_spread_of_known_values() -> None:
    assert Spread.of([5, 1, 4, 2, 3]) == Spread(1, 2, 3, 4, 5, 5)
    assert Spread.of([1, 2, 3, 4]).median == 2.5
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 7, 1)
    assert Spread.of([0, 10]) == Spread(0, 2.5, 5, 7.5, 10, 2)


def test_ratios_pair_what_belongs_to_one_round() -> None:
    """The second round ran on a machine of half the speed: each round's ratio is 2 all the same."""
    assert ratios([20, 10], [10, 5]) == Spread.of([2, 2])
    with pytest.raises(ValueError, match="shorter"):
        ratios([1, 2], [1])


@pytest.mark.parametrize(
    ("sequences", "share"),
    [
        ([[1, 2, 3, 4, 5]], 1.0),
        ([[1, 1, 1, 1, 1, 1]], 1 / 3),
        ([[1, 2, 1, 2, 1, 2, 1]], 1 / 2),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 1.0),  # outputs that equal each other do not repeat themselves
        ([], 1.0),
    ],
)
def test_distinct_4grams(sequences: list[list[int]], share: float) -> None:
    assert distinct_ngrams(sequences) == share


def test_a_report_is_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"contestant": "off", "rate": Spread.of([1.0, 3.0])}, {"contestant": "sync", "hits": 0.25}]
    report = Report({"speeds": rows, "holds": True, "choices": {"draft 8": 2}}, conditions={"dtype": "float32"})
    report.show()
    out = capsys.readouterr().out
    for text in ("dtype float32", "speeds", "2 (1.5 – 2.5)", "0.25", "yes"):
        assert text in out
    written = json.loads(report.as_json())
    assert written["dtype"] == "float32" and written["speeds"][0]["rate"]["median"] == 2.0


def test_numbers_have_four_digits() -> None:
    shown = [report_module.text_of(value) for value in (0.98765, 12.3456, 1234.56, 98765.4, 3, None)]
    assert shown == ["0.9877", "12.35", "1235", "98765", "3", ""]


def test_the_machine_is_described(tmp_path: Path) -> None:
    described = describe_machine("float32")
    assert described["cpu"] and described["threads"] == torch.get_num_threads()
    assert described["matmul_dtype"] == "float32"
    assert report_module.read_probe(1)() > 0 and matmul_probe(torch.float32, 32)() > 0
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Processor\n")
    assert cpu_name(tmp_path / "cpuinfo") == "A Processor"
    assert cpu_name(tmp_path / "none")


@pytest.mark.parametrize(("native", "measured"), [(True, "bfloat16"), (False, "float32")])
def test_no_bfloat16_runs_without_instructions(native: bool, measured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[torch.dtype] = []
    monkeypatch.setattr(report_module, "matmul_probe", lambda dtype: probed.append(dtype) or (lambda: 1.0))
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda _: native)
    assert describe_machine("bfloat16")["matmul_dtype"] == measured
    assert probed == [getattr(torch, measured)]


# -- prompt files, settings, shards, models


PROMPTS = [Prompt(str(index), f"text {index}") for index in range(6)]


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": 7, "turns": ["a\\n", "b"], "other": 1}\n\n{"id": "x", "prompt": "☃"}\n')
    assert load_prompts(path) == [Prompt("7", "a\nb"), Prompt("x", "☃")]
    assert load_prompts(path, limit=1) == [Prompt("7", "a\nb")]


def test_a_bad_row_is_named_in_one_line(tmp_path: Path) -> None:
    """`bench serve` reads the same rows: test_serving_workloads.py has other bad ones."""
    path = write_rows(tmp_path / "p.jsonl", {"id": 0, "turns": ["good"]}, {"id": 1, "turns": [""]})
    with pytest.raises(InputError, match=r"\A.*p\.jsonl:2: .*\Z"):
        load_prompts(path)
    assert len(load_prompts(path, limit=1)) == 1


def test_mixed_jobs_hold_every_pair_once_and_mix_settings() -> None:
    jobs = mixed_jobs(PROMPTS, PARITY_SETTINGS, 8)
    assert len({(job.prompt.id, job.setting) for job in jobs}) == len(jobs) == len(PROMPTS) * len(PARITY_SETTINGS)
    assert len({job.setting for job in jobs[:4]}) == 4
    assert all(len({job.setting for job in jobs[at : at + 4]}) >= 3 for at in range(len(jobs) - 3))
    seeds = {(job.prompt.id, job.params.seed) for job in jobs}
    assert len(seeds) == len(PROMPTS)  # one seed for each prompt, whatever the setting


def test_shards_part_the_prompts(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", *({"id": prompt.id, "prompt": prompt.text} for prompt in PROMPTS))

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
