"""Tokens per second of Pilotfish and of other engines: the same pair, prompts, threads and cores, in turn."""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import get_args
from xml.etree.ElementTree import tostring

import msgspec
import torch

from pilotfish.cli.bench.compare.figures import PILOTFISH, TRANSFORMERS, Contender, headline, ratios_of, speed_row
from pilotfish.cli.bench.compare.peer import DRAFT, OURS, Generated, Peer, PeerSetup, Question
from pilotfish.cli.bench.contestants import take_turns
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.workload import parse_choices
from pilotfish.cli.pages.document import write_file
from pilotfish.config.fields import GGUFWeights, Mode, available_cores
from pilotfish.config.text import config_text
from pilotfish.engine.memory import precision_here
from pilotfish.errors import EngineError, ModelError, PromptError
from pilotfish.model.heads.weights import is_head
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.model.loading.precision import library_dtype

INSTALL = "pip install 'pilotfish[compare]'"
#: Packages of the extra by module.
PACKAGES = {"openvino_genai": "openvino-genai", "llama_cpp": "llama-cpp-python", "gguf": "gguf"}
HEAD = "the draft is a trained head, which it cannot load"


@dataclass(frozen=True)
class Library:
    engine: str
    peer: str  # the module that runs it
    module: str = ""  # the package's of the extra
    weights: Mapping[str, GGUFWeights] = field(default_factory=dict)  # of its GGUF files by the dtype of its products


#: By name in `--peers`. The reader of OpenVINO GenAI knows no weights but float16 that are not quantized.
LIBRARIES = {
    "transformers": Library(TRANSFORMERS, "transformers_peer"),
    "openvino": Library("OpenVINO GenAI", "openvino_peer", "openvino_genai", {"bfloat16": "f16", "float32": "f16"}),
    "llama.cpp": Library("llama.cpp", "llama_cpp_peer", "llama_cpp", {"bfloat16": "bf16", "float32": "f32"}),
}


@dataclass
class Players:
    cores: frozenset[int]
    sampled: bool
    stack: ExitStack
    plays: dict[str, Callable[[Question], Generated]] = field(default_factory=dict)
    contenders: dict[str, Contender] = field(default_factory=dict)
    left_out: list[Row] = field(default_factory=list)

    def leave_out(self, contestant: str, reason: object) -> None:
        self.left_out.append({"contestant": contestant, "reason": str(reason)})

    def enter(self, engine: str, module: str, setup: str, modes: Collection[str] = ()) -> None:
        """Load a peer and let its ways play; of ours only those of some modes."""
        peer = self.stack.enter_context(Peer(engine, module, setup, self.cores))
        for way in peer.ready.ways:
            contender = Contender(engine, way, peer.ready.precision)
            if modes and way.split()[0] not in modes:
                continue
            if self.sampled and way not in peer.ready.sampling:
                self.leave_out(contender.name, "greedy only here: it plays at temperature 0")
                continue
            self.contenders[contender.name] = contender
            self.plays[contender.name] = partial(peer.ask, way)


def run_compare(options: BenchOptions, progress: ProgressBar) -> Report:
    """After one prompt to warm up, all of them `repeats` times, past the end of sequence: all generate as much."""
    questions = questions_of(options)
    with ExitStack() as stack:
        players = load_all(options, max(len(one.prompt) for one in questions), stack, progress)
        progress.total = len(questions) * len(players.plays)
        rounds = take_turns(players.plays, questions, done=progress)
    field, greedy = players.contenders, not options.temperature
    results = {
        "versions": {package: version(package) for module, package in PACKAGES.items() if find_spec(module)},
        "contestants": [
            {"contestant": name, "engine": one.engine, "precision": one.precision} for name, one in field.items()
        ],
        "speeds": [speed_row(one, rounds, greedy=greedy) for one in field.values()],
        "ratios": ratios_of(field, rounds),
        "left_out": players.left_out,
    }
    if options.svg is not None:
        write_file(tostring(headline(results)).decode() + "\n", options.svg, "svg")
    return Report(results)


def questions_of(options: BenchOptions) -> list[Question]:
    """PromptError for a prompt that leaves no room for its output."""
    target, rows, new = options.models().target, options.rows(), options.max_tokens
    tokenizer, context = load_tokenizer(target), load_config(target).context
    tokens = {row.id: tokenizer.encode(row.text) if isinstance(row.text, str) else [*row.text] for row in rows}
    for name, prompt in tokens.items():
        if len(prompt) + new > context:
            raise PromptError(f"prompt {name}: {len(prompt)} tokens and {new} new ones exceed {context}")
    turns = [(rows[0], 0), *((row, turn) for turn in range(options.repeats) for row in rows)]
    return [
        Question(prompt=tokens[row.id], max_tokens=new, temperature=options.temperature, seed=row.seed + turn)
        for row, turn in turns
    ]


def load_all(options: BenchOptions, longest: int, stack: ExitStack, progress: ProgressBar) -> Players:
    """One after the other, each in a process of its own on the same cores. `longest` is that of the prompts."""
    modes = parse_choices("modes", options.modes, get_args(Mode))
    libraries = [LIBRARIES[name] for name in parse_choices("peers", options.peers, [*LIBRARIES])]
    threads = options.engine["threads"] or available_cores()
    cores = frozenset(sorted(os.sched_getaffinity(0))[:threads])
    players, setup = Players(cores, options.temperature > 0, stack), peer_setup(options, threads, longest)
    progress.note(f"loading {PILOTFISH}")
    for played, config in our_configs(options, modes, threads).items():
        players.enter(PILOTFISH, OURS, config, {played} if played == "async" else set(modes) - {"async"})
    for library in libraries:
        progress.note(f"loading {library.engine}")
        try:
            players.enter(library.engine, library.peer, config_text(converted(library, setup)))
        except (EngineError, ModelError) as error:
            players.leave_out(library.engine, error)
            continue
        if setup.draft is None:
            players.leave_out(f"{library.engine}, {DRAFT}", HEAD)
    return players


def our_configs(options: BenchOptions, modes: Collection[Mode], threads: int) -> dict[str, str]:
    """Engines by mode. That of sync plays off too; that of async shares its cores out between target and draft."""
    configs = {}
    if {"off", "sync"} & set(modes):
        configs["sync"] = config_text(options.engine_config(budget="fixed", threads=threads))
    if "async" in modes:
        configs["async"] = config_text(options.engine_config(mode="async", budget="fixed", threads=0))
    return configs


def peer_setup(options: BenchOptions, threads: int, longest: int) -> PeerSetup:
    """Of Hugging Face directories; a trained head is no draft for others. Products are in the dtype of ours; in float32
    where PyTorch has no instructions for bfloat16."""
    config, models = options.engine_config(), options.models()
    dtype = library_dtype(precision_here(config, models.target).dtype, torch.device(config.device))
    return PeerSetup(
        target=str(models.target),
        draft=None if is_head(models.draft) else str(models.draft),
        threads=threads,
        dtype=str(dtype).removeprefix("torch."),
        context=longest + options.max_tokens,
    )


def converted(library: Library, setup: PeerSetup) -> PeerSetup:
    """GGUF files where the library needs them. EngineError without the library, ModelError without such files."""
    needed = (library.module, "gguf") if library.module else ()
    if absent := " and ".join(PACKAGES[one] for one in needed if find_spec(one) is None):
        raise EngineError(f"{absent} not installed: {INSTALL}")
    if not library.weights:
        return setup
    from pilotfish.model.backends.gguf_file import gguf_of

    weights = library.weights[setup.dtype]
    target, draft = (None if one is None else str(gguf_of(Path(one), weights)) for one in (setup.target, setup.draft))
    return msgspec.structs.replace(setup, target=target, draft=draft)
