"""Tokens per second of Pilotfish and of other engines: the same pair, prompts, threads and cores, in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch
from harness import PAIR, Options, run
from headline import write_headline
from peers.comparison import PILOTFISH, TRANSFORMERS, Contender, ratios_of, speeds_of
from peers.process import ask, ready, start_peer
from peers.protocol import DRAFT, Generated, PeerSetup, Question

from pilotfish.cli.bench.contestants import take_turns
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.workload import Job
from pilotfish.config.fields import GGUFWeights, available_cores
from pilotfish.config.text import config_text
from pilotfish.engine.memory import precision_here
from pilotfish.errors import EngineError, ModelError, PromptError
from pilotfish.model.heads.weights import is_head
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.model.loading.precision import library_dtype

INSTALL = "pip install 'pilotfish[compare]'"
#: Modules by package of the extra.
MODULES = {"openvino-genai": "openvino_genai", "llama-cpp-python": "llama_cpp", "gguf": "gguf"}


@dataclass(frozen=True)
class Library:
    """An engine of the extra."""

    engine: str
    module: str  # its peer
    package: str
    weights: Mapping[str, GGUFWeights]  # those of its GGUF files by the dtype of its products

    def absent(self) -> str:
        """Packages of its that are not installed, if any."""
        return " and ".join(one for one in (self.package, "gguf") if find_spec(MODULES[one]) is None)


#: By name in `--peers`. The reader of OpenVINO GenAI knows no weights but float16 that are not quantized.
LIBRARIES = {
    "openvino": Library("OpenVINO GenAI", "openvino_peer", "openvino-genai", {"bfloat16": "f16", "float32": "f16"}),
    "llama.cpp": Library("llama.cpp", "llama_cpp_peer", "llama-cpp-python", {"bfloat16": "bf16", "float32": "f32"}),
}


@dataclass
class Players:
    """Who plays, by contestant, and who does not."""

    plays: dict[str, Callable[[Question], Generated]] = field(default_factory=dict)
    contenders: dict[str, Contender] = field(default_factory=dict)
    left_out: list[Row] = field(default_factory=list)

    def leave_out(self, contestant: str, reason: object) -> None:
        self.left_out.append({"contestant": contestant, "reason": str(reason)})

    def at(self, temperature: float) -> dict[str, Callable[[Question], Generated]]:
        """Those who take part at a temperature."""
        return {name: play for name, play in self.plays.items() if not temperature or self.contenders[name].samples}


def run_compare(options: Options, progress: ProgressBar) -> Report:
    """Every contestant runs the first prompt to warm up, then `repeats` times every prompt. The end of sequence is
    ignored, so that all generate as much."""
    temperatures, prompts = options.temperatures, read_prompts(options)
    speeds, ratios = list[Row](), list[Row]()
    with ExitStack() as stack:
        players = load_all(options, max(map(len, prompts.values())), stack, progress)
        rounds_each = 1 + options.repeats * len(prompts)
        progress.total = rounds_each * sum(len(players.at(temperature)) for temperature in temperatures)
        for temperature in temperatures:
            rounds = take_turns(
                players.at(temperature),
                questions_of(options, prompts, temperature),
                done=lambda name, t=temperature: progress(f"{name}, T={t:g}"),  # type: ignore[misc]
            )
            where = {"temperature": temperature}
            speeds += [where | row for row in speeds_of(players.contenders, rounds, greedy=not temperature)]
            ratios += [where | row for row in ratios_of(players.contenders, rounds)]
    if any(temperatures):
        for name in players.plays.keys() - players.at(max(temperatures)).keys():
            players.leave_out(name, "greedy only here: it plays at temperature 0")
    contestants = [one.as_row() for one in players.contenders.values()]
    results = {"versions": versions(), "contestants": contestants, "speeds": speeds, "ratios": ratios}
    if options.svg:
        write_headline(results, options.title, Path(options.svg))
    return Report({**results, "left_out": players.left_out})


def read_prompts(options: Options) -> dict[str, list[int]]:
    """Tokens of all prompts by id; PromptError for one that leaves no room for its output."""
    target = options.models().target
    tokenizer, context = load_tokenizer(target), load_config(target).context
    found = {row.id: tokenizer.encode(row.text) for row in options.rows()}
    for name, tokens in found.items():
        if len(tokens) + options.max_tokens > context:
            raise PromptError(f"prompt {name}: {len(tokens)} tokens and {options.max_tokens} new ones exceed {context}")
    return found


def questions_of(options: Options, prompts: Mapping[str, list[int]], temperature: float) -> list[Question]:
    rows = options.rows()
    jobs = [row.job(temperature, options.max_tokens, turn) for turn in range(options.repeats) for row in rows]
    return [_question(job, prompts) for job in (rows[0].job(temperature, options.max_tokens, 0), *jobs)]


def _question(job: Job, prompts: Mapping[str, list[int]]) -> Question:
    params = job.params
    return Question(
        prompt=prompts[job.prompt.id],
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed or 0,
    )


# -- loading


def load_all(options: Options, longest: int, stack: ExitStack, progress: ProgressBar) -> Players:
    """One after the other, each in a process of its own on the same cores. `longest` is that of the prompts."""
    libraries = [LIBRARIES[name] for name in options.peers]
    players = Players()
    enter = partial(_enter, players, stack, progress, cores_for(_threads(options)))
    for mode, config in our_configs(options).items():
        enter(PILOTFISH, "pilotfish_peer", config, {mode} if mode == "async" else set(options.modes))
    setup = peer_setup(options, longest, tuple(options.guesses))
    enter(TRANSFORMERS, "transformers_peer", setup.text)
    for library in libraries:
        try:
            converted = converted_setup(library, setup, progress)
            enter(library.engine, library.module, converted.text)
        except (EngineError, ModelError) as error:
            players.leave_out(library.engine, error)
            continue
        if converted.draft is None:
            players.leave_out(f"{library.engine}, {DRAFT}", "a trained head is no draft that it can load")
    return players


def _enter(
    players: Players,
    stack: ExitStack,
    progress: ProgressBar,
    cores: frozenset[int],
    engine: str,
    module: str,
    setup: str,
    modes: set[str] | None = None,
) -> None:
    """Load a peer and let its ways play; of ours only those of some modes."""
    progress.note(f"loading {engine}")
    peer = stack.enter_context(start_peer(engine, module, setup, cores))
    found = ready(peer)
    for way in found.ways:
        if modes is None or way.split()[0] in modes:
            contender = Contender(engine, way, found.precision, way in found.sampling)
            players.contenders[contender.name] = contender
            players.plays[contender.name] = lambda question, way=way: ask(peer, way, question)  # type: ignore[misc]
    for way, reason in found.left_out.items():
        players.leave_out(f"{engine}, {way}", reason)


def _threads(options: Options) -> int:
    return options.threads or available_cores()


def cores_for(threads: int) -> frozenset[int]:
    """As many of this process's cores as there are threads: the same for all."""
    return frozenset(sorted(os.sched_getaffinity(0))[:threads])


def our_configs(options: Options) -> dict[str, str]:
    """Engines by mode. That of sync plays off too; that of async shares its cores out between target and draft."""
    modes = options.modes
    configs = {}
    if {"off", "sync"} & set(modes):
        configs["sync"] = config_text(options.engine_config(budget="fixed", threads=_threads(options)))
    if "async" in modes:
        configs["async"] = config_text(options.engine_config(mode="async", budget="fixed", threads=0))
    return configs


def peer_setup(options: Options, longest: int = 0, guesses: tuple[int, ...] = ()) -> PeerSetup:
    """Of Hugging Face directories. Products are in the dtype of ours; in float32 where PyTorch has no instructions for
    bfloat16."""
    config, models = options.engine_config(), options.models()
    dtype = library_dtype(precision_here(config, models.target).dtype, torch.device(config.device))
    return PeerSetup(
        target=str(models.target),
        draft=str(models.draft),
        threads=_threads(options),
        dtype=str(dtype).removeprefix("torch."),
        context=longest + options.max_tokens,
        guesses=guesses,
        quantization=config.quantization,
    )


def converted_setup(library: Library, setup: PeerSetup, progress: ProgressBar) -> PeerSetup:
    """Of GGUF files. EngineError where the library is not installed or has no such weights; ModelError for a model that
    is not converted."""
    if absent := library.absent():
        raise EngineError(f"{absent} not installed: {INSTALL}")
    if setup.quantization != "none":
        raise EngineError(f"weights of {setup.quantization} are torchao's, which it cannot load")
    from pilotfish.model.backends.gguf_file import gguf_of

    progress.note(f"converting for {library.engine}")
    weights, draft = library.weights[setup.dtype], Path(str(setup.draft))
    converted = None if is_head(draft) else str(gguf_of(draft, weights))
    return msgspec.structs.replace(setup, target=str(gguf_of(Path(setup.target), weights)), draft=converted)


def versions() -> dict[str, str]:
    """Of the packages of the extra that are installed."""
    found = {}
    for package in MODULES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    run(
        run_compare,
        *PAIR,
        "nodes",
        "levels",
        "width",
        "quantization",
        threads=2,
        temperatures=[0.0],
        modes=["off", "sync", "async"],
        peers=[*LIBRARIES],
        guesses=[3, 8],
        repeats=3,
        svg="",
        title="Greedy decoding, one request at a time",
    )
