"""OpenVINO GenAI beside ours, with an interpreter whose OpenVINO is a stand-in; no test says how fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import Measure
from support import SNIPPETS
from typer.testing import CliRunner

from pilotfish.bench import app, reuse
from pilotfish.bench.contestants import Run
from pilotfish.bench.dialogues import SAMPLED, WORKLOADS
from pilotfish.bench.peers import (
    ASSISTED,
    BEST,
    DEFAULT,
    OURS,
    PACKAGES,
    PLAIN,
    check_openvino,
    digest,
    figures_of,
    run_peers,
)
from pilotfish.bench.reuse import run_reuse
from pilotfish.core.request import RequestStats
from pilotfish.errors import EngineError, InputError

#: Runs as OpenVINO's interpreter: this one, with the stand-ins in place of what `-I` would give it.
PYTHON = """#!/bin/sh
shift
PYTHONPATH={packages} exec {python} -P "$@"
"""
#: GenAI's classes, as far as they are used. "Tokens" of a text are those of the tokenizer that was exported; the target
#: alone gives 1, 2, 3, …, with its draft it stops there and goes on with what was guessed at a time.
GENAI = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from tokenizers import Tokenizer

print("a library's own word on stdout")

class SchedulerConfig:
    enable_prefix_caching = True

class StreamerBase:
    pass

StreamingStatus = SimpleNamespace(RUNNING=0)

class GenerationConfig:
    num_assistant_tokens = None

def draft_model(directory, device, **properties):
    return SimpleNamespace(directory=directory, properties=properties)

class LLMPipeline:
    def __init__(self, directory, device, scheduler_config, draft_model=None, **properties):
        assert device == "CPU" and properties == {{"INFERENCE_NUM_THREADS": 1}}
        self.reuse = scheduler_config.enable_prefix_caching
        assert draft_model is None or draft_model.properties == properties and Path(draft_model.directory).is_dir()
        self.draft, self.tokenizer = draft_model, Tokenizer.from_file(directory + "/tokenizer.json")

    def get_tokenizer(self):
        return self

    def encode(self, text):
        ids = self.tokenizer.encode({encoded}).ids
        return SimpleNamespace(input_ids=SimpleNamespace(data=np.array([ids])))

    def decode(self, tokens):
        return self.tokenizer.decode([token for token in tokens if token > 0])

    def generate(self, prompt, config, streamer=None):
        assert config.ignore_eos and not config.do_sample and (streamer is not None or not self.reuse)
        if streamer is not None:
            streamer.write(1)
        guessed = -1 if self.draft is None else config.num_assistant_tokens or 0
        tokens = [guessed, *range(2, config.max_new_tokens + 1)]
        return SimpleNamespace(tokens=[tokens])
"""
#: `optimum-cli export openvino`: copies the model.
EXPORT = """
import os, shutil, sys

assert sys.argv[1:4] == ["export", "openvino", "--model"] and "fp16" in sys.argv and os.environ["HF_HUB_OFFLINE"]
if {fails}:
    sys.exit("progress\\nthe model cannot be exported")
shutil.copytree(sys.argv[4], sys.argv[-1])
"""
Installed = Callable[..., str]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Makes an interpreter: its path."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))

    def install(packages: tuple[str, ...] = PACKAGES, encoded: str = "text", fails: bool = False) -> str:
        site = tmp_path / "site"
        commands = site / "optimum" / "commands"
        commands.mkdir(parents=True)
        (commands / "optimum_cli.py").write_text(EXPORT.format(fails=fails))
        (site / "openvino_genai.py").write_text(GENAI.format(encoded=encoded))
        for package in packages:
            described = site / f"{package.replace('-', '_')}-1.2.dist-info"
            described.mkdir()
            (described / "METADATA").write_text(f"Name: {package}\nVersion: 1.2\n")
        python = tmp_path / "python"
        python.write_text(PYTHON.format(packages=site, python=sys.executable))
        python.chmod(0o755)
        return str(python)

    return install


def test_peers(measure: Measure, installed: Installed, tmp_path: Path) -> None:
    python = installed()
    results = measure(run_peers, "peers", openvino=python, max_tokens=6, repeats=2, threads=1).results
    assert results["versions"] == dict.fromkeys(PACKAGES, "1.2")
    rows = {row["contestant"]: row for row in results["speeds"]}
    assert list(rows) == [*OURS, PLAIN, *ASSISTED]
    assert all(row["tokens_per_second"].count == 4 for row in rows.values())
    assert all(rows[name]["as_off"].minimum == rows[name]["equal_outputs"] == 1 for name in OURS)
    assert all(rows[name]["as_off"].maximum < 1 for name in (PLAIN, *ASSISTED))
    exported = sorted((tmp_path / "cache" / "openvino").iterdir())
    assert len(exported) == 2 and all((one / "tokenizer.json").is_file() for one in exported)
    written = [one.stat().st_mtime_ns for one in exported]
    measure(run_peers, "peers", openvino=python, max_tokens=2, repeats=1, threads=1)
    assert [one.stat().st_mtime_ns for one in sorted((tmp_path / "cache" / "openvino").iterdir())] == written


def test_turns(measure: Measure, installed: Installed) -> None:
    given = {"openvino": installed(), "max_tokens": 2, "repeats": 1, "threads": 1, "shared": 64, "kv_slots": 4096}
    results = measure(run_reuse, "reuse", **given).results
    rows = {(row["workload"], row["contestant"]): row for row in results["first_tokens"]}
    assert results["versions"] == dict.fromkeys(PACKAGES, "1.2")
    assert rows.keys() == {*product(WORKLOADS, (*reuse.OURS, *reuse.THEIRS))} - {*product((SAMPLED,), reuse.THEIRS)}
    assert all(row["cached_tokens"] is None for (_, name), row in rows.items() if name in reuse.THEIRS)


def test_the_command(installed: Installed, llama: Path, draft: Path, prompt_file: Path) -> None:
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file), "--limit", "1"]
    options = ["--dtype", "float32", "--max-tokens", "2", "--repeats", "1", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, ["peers", *models, *options, "--openvino", installed()])
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["ratios"][0]["denominator"] == PLAIN


def test_figures() -> None:
    """The best of its drafts is one setting for all rounds; the better of plain and draft is chosen in each."""

    def runs(*seconds: float, stats: bool = False) -> list[Run]:
        own = [RequestStats(verify_steps=6)] if stats else []
        return [Run(spent, [[1, 2, 3, 4, 5, 6]], own) for spent in seconds]

    ours = {name: runs(3.0, 2.0, 1.0, stats=True) for name in OURS}
    drafts: dict[str, Any] = {name: runs(9.0, 9.0, 1.0) for name in ASSISTED}
    drafts["OpenVINO, draft of 3"] = runs(6.0, 4.0, 4.0)
    rounds = {**ours, PLAIN: [*runs(3.0, 8.0), Run(6.0, [[1, 2, 0, 4, 5, 6]])], **drafts}
    figures = figures_of(rounds)
    ratios = {(row["numerator"], row["denominator"]): row["ratio"] for row in figures["ratios"]}
    assert {denominator for _, denominator in ratios} == {PLAIN, DEFAULT, "OpenVINO, draft of 3", BEST}
    assert ratios["off", PLAIN].median == 4 and ratios["off", "OpenVINO, draft of 3"].median == 2
    best = ratios["sync lm", BEST]
    assert (best.minimum, best.median, best.maximum) == (1, 2, 4)
    as_off = {row["contestant"]: row["as_off"] for row in figures["speeds"]}
    assert as_off[PLAIN].minimum == 2 / 6 and as_off[PLAIN].maximum == as_off["off"].minimum == 1


@pytest.mark.parametrize("missing", PACKAGES)
def test_an_interpreter_without_openvino_is_refused(installed: Installed, missing: str) -> None:
    python = installed(tuple(package for package in PACKAGES if package != missing))
    with pytest.raises(InputError, match=r"^openvino: .* is not allowed; expected a Python interpreter with"):
        check_openvino(python)


@pytest.mark.parametrize("path", ["", "nothing/here", os.devnull, "/bin/true", sys.executable])
def test_what_is_no_such_interpreter_is_refused(path: str, measure: Measure) -> None:
    with pytest.raises(InputError, match=r"^openvino: ") as raised:
        measure(run_peers, "peers", openvino=path)
    assert "\n" not in str(raised.value)


def test_an_interpreter_must_be_given(prompt_file: Path) -> None:
    result = CliRunner().invoke(app, ["peers", "--prompts", str(prompt_file)])
    assert result.exit_code == 2 and "openvino" in result.output


def test_a_failed_export_is_told_and_leaves_nothing(installed: Installed, measure: Measure, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"^the export to OpenVINO failed: the model cannot be exported$"):
        measure(run_peers, "peers", openvino=installed(fails=True), threads=1)
    assert not list((tmp_path / "cache" / "openvino").iterdir())


def test_other_tokens_of_a_prompt_are_told(installed: Installed, measure: Measure) -> None:
    with pytest.raises(EngineError, match="reads prompt own/0 as other tokens"):
        measure(run_peers, "peers", openvino=installed(encoded="text[1:]"), max_tokens=2, repeats=1, threads=1)


def test_another_version_or_model_is_exported_anew(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(SNIPPETS[0])
    first = digest(model, {"a": "1"})
    assert digest(model, {"a": "1"}) == first != digest(model, {"a": "2"})
    (model / "config.json").write_text(SNIPPETS[1])
    assert digest(model, {"a": "1"}) != first
