"""Options that several commands take."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from pilotfish.config import BudgetKind, DType, EngineConfig, Mode, Quantization
from pilotfish.errors import InputError, ParameterError

DEFAULT_PAIR = "pycode"

#: Options of these panels stand below the first ones in --help.
speculation = partial(typer.Option, rich_help_panel="Speculation")
elsewhere = partial(typer.Option, rich_help_panel="Drafts in processes of their own (--mode async)")
machine = partial(typer.Option, rich_help_panel="Device and memory")
sampled = partial(typer.Option, rich_help_panel="Sampling")

DTypeOption = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
QuantizationOption = Annotated[str, machine("--quantization", help="Weights: none, int8, or fp8 on CUDA.")]
DeviceOption = Annotated[str, machine("--device", help="cpu, or cuda where there is one.")]
ThreadsOption = Annotated[int, machine("--threads", help="CPU threads; 0: all cores of this process.")]
EagerOption = Annotated[bool, machine("--eager", help="The reference: plain torch operations, no C++ kernels.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
KVSlotsOption = Annotated[int, machine("--kv-slots", help="Tokens that fit into the KV pool; 0: planned.")]
MemoryOption = Annotated[float, machine("--memory", help="GiB to stay within; 0: most of what is free.")]
PaceOption = Annotated[str, machine("--pace", help="Emulate devices, as in target=10.4ms,draft=2.6ms.")]
TraceOption = Annotated[Path | None, machine("--trace", help="Write a timeline of steps and levels to this file.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="New tokens at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")]


@dataclass(frozen=True)
class EngineOptions:
    """Which models, how they speculate, and what runs them."""

    pair: Annotated[str | None, typer.Option(help="The bundled pair: pycode, or pycode@<N>m. The default.")] = None
    target: Annotated[
        Path | None, typer.Option("--target", "--model", help="A model directory in Hugging Face format.")
    ] = None
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, with a target.")] = None
    mode: Annotated[str | None, typer.Option(help="off, sync or async; by default as the draft allows.")] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: as the checkpoint.")] = EngineConfig.dtype
    max_model_len: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Of prompt and output, at most.", show_default="the model's context"),
    ] = None
    drafter: Annotated[str | None, speculation(help="lm, ngram, suffix, or several joined by +.")] = None
    nodes: Annotated[int, speculation(help="Nodes of a token tree, at most.")] = EngineConfig.nodes
    levels: Annotated[int, speculation(help="Draft forwards that grow a tree, at most.")] = EngineConfig.levels
    width: Annotated[int, speculation(help="Leaves that a draft forward expands, in sync.")] = EngineConfig.width
    budget: Annotated[str, speculation(help="auto: guess as much as pays; fixed: always all.")] = EngineConfig.budget
    ngram_min: Annotated[int, speculation(help="Tokens that n-gram lookup matches, at least.")] = EngineConfig.ngram_min
    ngram_max: Annotated[int, speculation(help="And at most.")] = EngineConfig.ngram_max
    leaves: Annotated[int, elsewhere(help="Leaves that a draft forward expands.")] = EngineConfig.leaves
    draft_workers: Annotated[int, elsewhere(help="Draft processes.")] = EngineConfig.draft_workers
    draft_cores: Annotated[str, elsewhere(help="Their cores.", show_default="a few")] = EngineConfig.draft_cores
    draft_pool: Annotated[str | None, elsewhere(help="Pools instead: ipc://… or tcp://…, joined by ,")] = None
    draft_key: Annotated[Path | None, elsewhere(help="This target's key file, for pools with keys.")] = None
    draft_pool_key: Annotated[str | None, elsewhere(help="The pools' public keys, joined by a space.")] = None
    draft_optional: Annotated[bool, elsewhere("--draft-optional", help="Serve without a pool that fails.")] = False
    insecure: Annotated[bool, elsewhere("--insecure", help="Use pools on other hosts without keys.")] = False
    quantization: QuantizationOption = EngineConfig.quantization
    device: DeviceOption = EngineConfig.device
    threads: ThreadsOption = EngineConfig.threads
    cores: Annotated[str, machine(help="Cores to run on, as in 0,2-3.", show_default="all")] = EngineConfig.cores
    kv_slots: KVSlotsOption = EngineConfig.kv_slots
    memory: MemoryOption = EngineConfig.memory
    pace: PaceOption = EngineConfig.pace
    trace: TraceOption = None
    eager: EagerOption = False

    def config(self, concurrency: int) -> EngineConfig:
        """For up to `concurrency` sequences at a time, or the default number where that is more."""
        models = resolve_models(self.pair, self.target, self.draft)
        plain = "off" if models.draft is None and self.drafter is None else "sync"
        mode = self.mode or ("async" if self.draft_pool else plain)
        return EngineConfig(
            target=models.target,
            draft=models.draft,
            mode=cast(Mode, mode),  # EngineConfig checks it, and the others
            drafter=self.drafter or EngineConfig.drafter,
            nodes=self.nodes,
            levels=self.levels,
            width=self.width,
            ngram_min=self.ngram_min,
            ngram_max=self.ngram_max,
            leaves=self.leaves,
            draft_workers=self.draft_workers,
            draft_cores=self.draft_cores,
            draft_pool=tuple(self.draft_pool.split(",")) if self.draft_pool else (),
            draft_key=self.draft_key,
            draft_pool_key=tuple(self.draft_pool_key.split()) if self.draft_pool_key else (),
            draft_optional=self.draft_optional,
            insecure=self.insecure,
            budget=cast(BudgetKind, self.budget),
            dtype=dtype_of(self.dtype, models.target),
            max_model_len=0 if self.max_model_len is None else count("max_model_len", self.max_model_len),
            quantization=cast(Quantization, self.quantization),
            device=self.device,
            threads=self.threads,
            cores=self.cores,
            kv_slots=self.kv_slots,
            memory=self.memory,
            max_requests=max(concurrency, EngineConfig.max_requests),
            pace=self.pace,
            trace=self.trace,
            eager=self.eager,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """Fields of SamplingParams; None leaves them to the model's generation_config.json, then to our defaults."""

    max_tokens: Annotated[int | None, typer.Option(help="New tokens at most.")] = None
    min_tokens: Annotated[int | None, sampled(help="No end of sequence and no stop before.")] = None
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None
    top_k: Annotated[int | None, sampled(help="Keep the k likeliest tokens; 0: all.")] = None
    top_p: Annotated[float | None, sampled(help="Keep the likeliest tokens of this mass.")] = None
    min_p: Annotated[float | None, sampled(help="Drop tokens below this share of the best.")] = None
    repetition_penalty: Annotated[float | None, sampled(help="Above 1: less of what came before.")] = None
    presence_penalty: Annotated[float | None, sampled(help="Off logits of tokens in the output.")] = None
    frequency_penalty: Annotated[float | None, sampled(help="The same, times their count.")] = None
    logit_bias: Annotated[list[str] | None, sampled(help="ID=BIAS. Repeatable.")] = None
    allowed_token_id: Annotated[list[int] | None, sampled(help="Give no other token. Repeatable.")] = None
    bad_token_id: Annotated[list[int] | None, sampled(help="Never give this token. Repeatable.")] = None
    bad_word: Annotated[list[str] | None, sampled(help="Never write this. Repeatable.")] = None
    stop: Annotated[list[str] | None, sampled(help="End before this text. Repeatable.")] = None
    stop_token_id: Annotated[list[int] | None, sampled(help="End at this token. Repeatable.")] = None
    ignore_eos: Annotated[bool, sampled("--ignore-eos", help="Go on after the end of sequence.")] = False
    seed: Annotated[int | None, typer.Option(help="0 to 2^64 - 1; drawn and reported if absent.")] = None

    def given(self) -> dict[str, Any]:
        """Those that were given, by the names that SamplingParams has for them."""
        fields = {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _biases(self.logit_bias),
            "allowed_token_ids": _tuple(self.allowed_token_id),
            "bad_token_ids": _tuple(self.bad_token_id),
            "bad_words": _tuple(self.bad_word),
            "stop": _tuple(self.stop),
            "stop_token_ids": _tuple(self.stop_token_id),
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


def _tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return tuple(values) if values else None


def _biases(pairs: Sequence[str] | None) -> dict[int, float] | None:
    return dict(map(_bias, pairs)) if pairs else None


def _bias(pair: str) -> tuple[int, float]:
    token, _, bias = pair.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise ParameterError("logit_bias", pair, "ID=BIAS, as in 42=-5.5") from error


@dataclass(frozen=True)
class Handling:
    """How the rows of `generate` are run."""

    cache_salt: str | None
    concurrency: int
    raw: bool
    profile: Path | None


@dataclass(frozen=True)
class Models:
    """Where the models are."""

    target: Path
    draft: Path | None


def resolve_models(pair: str | None, target: Path | None, draft: Path | None) -> Models:
    """The directories that --pair, or --target and --draft, name; the bundled pair when nothing is given."""
    if target is not None:
        if pair is not None:
            raise InputError("pair: it cannot be combined with --target; give one of them")
        return Models(model_directory("target", target), draft and model_directory("draft", draft))
    if draft is not None:
        raise InputError("draft: it needs --target; a pair brings its own draft")
    from pilotfish.pairs import resolve_pair

    dirs = resolve_pair(pair or DEFAULT_PAIR)
    return Models(dirs.target, dirs.draft)


def model_directory(field: str, path: Path) -> Path:
    """`path`; ParameterError, naming `field`, where there is no directory."""
    if not path.is_dir():
        raise ParameterError(field, str(path), "a model directory in Hugging Face format; nothing is downloaded")
    return path


def dtype_of(name: str, target: Path) -> DType:
    """`auto` is that of the target's weights where it is one of ours, else the default."""
    if name in ("float16", "half"):
        raise ParameterError("dtype", name, "auto, float32, or bfloat16, which takes as much memory")
    if name != "auto":
        return cast(DType, {"float": "float32"}.get(name, name))
    with suppress(OSError, ValueError):  # what is wrong with the file is told where the model is loaded
        config = json.loads((target / "config.json").read_text())
        stored = config.get("dtype", config.get("torch_dtype")) if isinstance(config, dict) else None
        return cast(DType, stored) if stored in get_args(DType) else EngineConfig.dtype
    return EngineConfig.dtype


#: What a whole number may end with.
_UNITS = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}


def count(field: str, text: str) -> int:
    """A whole number, as in 8192, 8k or 8K. ParameterError, naming `field`, otherwise."""
    if (match := re.fullmatch(r"(\d{1,12})([kKmM]?)", text, re.ASCII)) is None:
        raise ParameterError(field, text, "a whole number, as in 8192, 8k (8000) or 8K (8192)")
    return int(match[1]) * _UNITS[match[2]]
