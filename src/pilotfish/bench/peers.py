"""Greedy tokens per second of this engine and of OpenVINO GenAI: same weights, threads and prompts, in turn."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from pilotfish.bench.contestants import Run, drafting, over, rates, speed_of, take_turns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.programs import Program
from pilotfish.bench.report import ProgressBar, Report, Row, Spread
from pilotfish.bench.workload import Job
from pilotfish.engine.engine import Engine
from pilotfish.engine.process import WorkerSpec
from pilotfish.errors import EngineError, ParameterError
from pilotfish.pairs.inflate import cache_folder

OURS = {"off": "off", "sync lm": "lm", "sync lm+ngram": "lm+ngram"}
PLAIN, DEFAULT = "OpenVINO", "OpenVINO, draft"
#: Tokens that its draft guesses at a time; 0: as GenAI chooses.
ASSISTED = {
    DEFAULT: 0,
    "OpenVINO, draft of 2": 2,
    "OpenVINO, draft of 3": 3,
    "OpenVINO, draft of 8": 8,
}
BEST = "OpenVINO, better of plain and draft"
PACKAGES = ("openvino-genai", "openvino-tokenizers", "optimum-intel")
VERSIONS = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {PACKAGES}}}))"
PEER, TURNS_PEER = map(Path(__file__).with_name, ("openvino_peer.py", "openvino_turns.py"))
EXPORT = ("-m", "optimum.commands.optimum_cli", "export", "openvino")
FORMAT = ("--task", "text-generation-with-past", "--weight-format", "fp16")


def run_peers(options: BenchOptions, progress: ProgressBar) -> Report:
    """Runs the first prompt to warm up, then `repeats` times every prompt with every contestant. The end of sequence is
    ignored, so that all generate as much."""
    versions = check_openvino(options.openvino)
    engine, prompts = Engine(options.engine_config()), options.rows()
    for prompt in prompts:
        engine.check_prompt(prompt.text)
    config = engine.config
    assert config.draft is not None
    exported = [str(export(options.openvino, model, versions, progress)) for model in (config.target, config.draft)]
    jobs = [prompt.job(0.0, options.max_tokens, offset=0) for prompt in (prompts[0], *prompts * options.repeats)]
    jobs = [replace(job, params=replace(job.params, ignore_eos=True)) for job in jobs]
    with start_peer(options.openvino, exported, options.engine["threads"]) as peer:
        contestants = contestants_of(engine, peer)
        progress.total = len(contestants) * len(jobs)
        rounds = take_turns(contestants, jobs, done=progress)
    return Report({"versions": versions, **figures_of(rounds)})


def contestants_of(engine: Engine, peer: Program) -> dict[str, Callable[[Job], Run]]:
    theirs = {PLAIN: None, **ASSISTED}
    return {
        **{name: partial(_our_run, engine, drafter) for name, drafter in OURS.items()},
        **{name: partial(_their_run, engine, peer, guessed) for name, guessed in theirs.items()},
    }


def _our_run(engine: Engine, drafter: str, job: Job) -> Run:
    run = drafting(engine, drafter).run(engine, [job], 1)
    return replace(run, steps=[])  # nobody compares their periods here


def _their_run(engine: Engine, peer: Program, guessed: int | None, job: Job) -> Run:
    """EngineError where the exported tokenizer reads the prompt as other tokens."""
    text = job.prompt.text
    answer = peer.ask(text=text, max_tokens=job.params.max_tokens, assistant_tokens=guessed)
    if answer["prompt"] != engine.check_prompt(text):
        raise EngineError(f"OpenVINO's tokenizer reads prompt {job.prompt.id} as other tokens than ours")
    return Run(answer["seconds"], [answer["tokens"]])


def figures_of(rounds: Mapping[str, Sequence[Run]]) -> dict[str, list[Row]]:
    """`as_off` is the share of the tokens before the first that is not that of our target alone."""
    best = max(ASSISTED, key=lambda name: Spread.of(rates(rounds[name])).median)
    turns = zip(rounds[PLAIN], rounds[best], strict=True)
    known = {**rounds, BEST: [max(both, key=attrgetter("tokens_per_second")) for both in turns]}
    off = [run.outputs[0] for run in rounds["off"]]
    agreeing = {name: Spread.of([*map(_agreeing, outputs_of(rounds[name]), off)]) for name in rounds}
    pairs = [(above, below) for below in dict.fromkeys((PLAIN, DEFAULT, best, BEST)) for above in OURS]
    return {
        "speeds": [{**speed_of(name, rounds), "as_off": agreeing[name]} for name in rounds],
        "ratios": [{"numerator": n, "denominator": d, "ratio": over(n, d, known)} for n, d in pairs],
    }


def outputs_of(runs: Sequence[Run]) -> list[list[int]]:
    return [run.outputs[0] for run in runs]


def _agreeing(output: Sequence[int], other: Sequence[int]) -> float:
    same = [a == b for a, b in zip(output, other, strict=False)]
    return (same.index(False) if False in same else len(same)) / max(len(output), len(other))


# -- OpenVINO's interpreter


def check_openvino(python: str) -> dict[str, str]:
    """Versions of `PACKAGES` there; ParameterError where they are not installed."""
    allowed = f"a Python interpreter with {' and '.join(PACKAGES)} (docs/benchmarks.md says how to install them)"
    try:
        done = subprocess.run([python, "-I", "-c", VERSIONS], capture_output=True, text=True, check=True)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise ParameterError("openvino", python, allowed) from error
    return versions


def export(python: str, model: Path, versions: Mapping[str, str], progress: ProgressBar) -> Path:
    """The cached directory of the model and its tokenizer in OpenVINO's format, with weights of fp16; written on first
    use. EngineError where the export fails."""
    cached = cache_folder("openvino") / f"{model.name}-{digest(model, versions)}"
    if not cached.exists():
        progress.note(f"exporting {model.name} to OpenVINO")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as temporary:
            partial_export = Path(temporary) / cached.name
            command = [python, "-I", *EXPORT, "--model", str(model), *FORMAT, str(partial_export)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # all that it needs is here
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise EngineError(f"the export to OpenVINO failed: {(done.stderr.strip() or ' ').splitlines()[-1]}")
            if not cached.exists():
                partial_export.rename(cached)
    return cached


def digest(model: Path, versions: Mapping[str, str]) -> str:
    """Of everything that the export is made from."""
    found = hashlib.sha256(json.dumps(versions, sort_keys=True).encode())
    for path in sorted(model.iterdir()):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def start_peer(python: str, exported: Sequence[str], threads: int, script: Path = PEER) -> Program:
    """`exported` are the directories that the script takes: of target and draft, or of the target."""
    command = [python, "-I", str(script), *exported, str(threads)]
    return Program(WorkerSpec("OpenVINO", command), stdin=subprocess.PIPE)
