"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from pilotfish.config import BudgetKind, DType, EngineConfig, Mode, Quantization
from pilotfish.errors import InputError, ParameterError

DEFAULT_PAIR = "pycode"

DTypeOption = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
QuantizationOption = Annotated[str, typer.Option("--quantization", help="Weights: none, int8, or fp8 on CUDA.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, or cuda where there is one.")]
ThreadsOption = Annotated[int, typer.Option("--threads", help="CPU threads; 0: all cores of this process.")]
EagerOption = Annotated[bool, typer.Option("--eager", help="The reference: plain torch operations, no C++ kernels.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
KVSlotsOption = Annotated[int, typer.Option("--kv-slots", help="Tokens that fit into the KV pool; 0: planned.")]
MemoryOption = Annotated[float, typer.Option("--memory", help="GiB to stay within; 0: most of what is free.")]
PaceOption = Annotated[str, typer.Option("--pace", help="Emulate devices, as in target=10.4ms,draft=2.6ms.")]
TraceOption = Annotated[Path | None, typer.Option("--trace", help="Write a timeline of steps and levels to this file.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="New tokens at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")]


@dataclass(frozen=True)
class EngineOptions:
    """Which models, how they speculate, and what runs them."""

    pair: Annotated[str | None, typer.Option(help="The bundled pair: pycode, or pycode@<N>m. The default.")] = None
    target: Annotated[Path | None, typer.Option(help="A model directory in Hugging Face format.")] = None
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, with --target.")] = None
    mode: Annotated[str | None, typer.Option(help="off, sync or async; by default as the draft allows.")] = None
    drafter: Annotated[str | None, typer.Option(help="lm, ngram, suffix, or several joined by +.")] = None
    nodes: Annotated[int, typer.Option(help="Nodes of a token tree, at most.")] = EngineConfig.nodes
    levels: Annotated[int, typer.Option(help="Draft forwards that grow a tree, at most.")] = EngineConfig.levels
    width: Annotated[int, typer.Option(help="Leaves that a draft forward expands, in sync.")] = EngineConfig.width
    leaves: Annotated[int, typer.Option(help="The same of all sequences, in async.")] = EngineConfig.leaves
    draft_workers: Annotated[int, typer.Option(help="Draft processes, in async.")] = EngineConfig.draft_workers
    draft_cores: Annotated[str, typer.Option(help="Their cores.  [default: a few]")] = EngineConfig.draft_cores
    draft_pool: Annotated[str | None, typer.Option(help="Pools instead: ipc://… or tcp://…, joined by ,")] = None
    draft_key: Annotated[Path | None, typer.Option(help="This target's key file, for pools with keys.")] = None
    draft_pool_key: Annotated[str | None, typer.Option(help="The pools' public keys, joined by a space.")] = None
    draft_optional: Annotated[bool, typer.Option("--draft-optional", help="Serve without a pool that fails.")] = False
    insecure: Annotated[bool, typer.Option("--insecure", help="Use pools on other hosts without keys.")] = False
    budget: Annotated[str, typer.Option(help="auto: guess as much as pays; fixed: always all.")] = EngineConfig.budget
    dtype: DTypeOption = EngineConfig.dtype
    quantization: QuantizationOption = EngineConfig.quantization
    device: DeviceOption = EngineConfig.device
    threads: ThreadsOption = EngineConfig.threads
    cores: Annotated[str, typer.Option(help="Cores to run on, as in 0,2-3.  [default: all]")] = EngineConfig.cores
    kv_slots: KVSlotsOption = EngineConfig.kv_slots
    memory: MemoryOption = EngineConfig.memory
    pace: PaceOption = EngineConfig.pace
    trace: TraceOption = None
    eager: EagerOption = False
    ngram_min: Annotated[int, typer.Option(help="Tokens that n-gram lookup matches, at least.")] = (
        EngineConfig.ngram_min
    )
    ngram_max: Annotated[int, typer.Option(help="And at most.")] = EngineConfig.ngram_max

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
            dtype=cast(DType, self.dtype),
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
    min_tokens: Annotated[int | None, typer.Option(help="No end of sequence and no stop before.")] = None
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0: all.")] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this mass.")] = None
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the best.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what came before.")] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Off logits of tokens in the output.")] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, times their count.")] = None
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS. Repeatable.")] = None
    allowed_token_id: Annotated[list[int] | None, typer.Option(help="Give no other token. Repeatable.")] = None
    bad_token_id: Annotated[list[int] | None, typer.Option(help="Never give this token. Repeatable.")] = None
    bad_word: Annotated[list[str] | None, typer.Option(help="Never write this. Repeatable.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token. Repeatable.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of sequence.")] = False
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
        raise ParameterError(field, str(path), "a model directory in Hugging Face format")
    return path
