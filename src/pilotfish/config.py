"""How an engine is set up. Frozen; every field is checked when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pilotfish.core.sampling_params import MAX_SAMPLES
from pilotfish.errors import ParameterError
from pilotfish.options import refuse_unknown
from pilotfish.plan.pace import Paces

Mode = Literal["off", "sync", "async"]
BudgetKind = Literal["auto", "fixed"]
DrafterKind = Literal["lm", "ngram", "suffix"]
DType = Literal["float32", "bfloat16"]
Quantization = Literal["none", "int8", "fp8"]
MetricsLevel = Literal["none", "summary", "detailed"]
GenerationDefaults = Literal["auto", "vllm"]
#: Seconds of silence that a busy machine brings about by itself.
MIN_TARGET_TIMEOUT = 2.0


def drafter_kinds(drafter: str) -> tuple[DrafterKind, ...]:
    """The drafters that `lm`, `lm+ngram`, … name, in DrafterKind's order; ParameterError otherwise."""
    names = drafter.split("+") if isinstance(drafter, str) else []
    kinds: tuple[DrafterKind, ...] = get_args(DrafterKind)
    chosen = tuple(kind for kind in kinds if kind in names)
    if not chosen or len(chosen) != len(names):
        raise ParameterError("drafter", drafter, f"{', '.join(kinds)}, or several joined by +, each once")
    return chosen


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_cores(text: str, field: str = "cores") -> frozenset[int]:
    """Core numbers of "0,2-3"; ParameterError, naming `field`, for what is no such list, and for cores that the process
    may not use."""
    if text == "":
        return frozenset()
    may_use = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    chosen: set[int] = set()
    for part in str(text).split(","):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.isdecimal() and len(end) < 6 for end in ends):
            raise ParameterError(field, text, "core numbers and ranges, as in 0,2-3")
        chosen |= set(range(int(ends[0]), int(ends[-1]) + 1))
    if not chosen or not chosen <= may_use:
        raise ParameterError(field, text, f"cores of {', '.join(map(str, sorted(may_use)))}")
    return frozenset(chosen)


def model_name(directory: Path) -> str:
    """What a model is called where others see it: its directory's name, and that of the directory around it."""
    return "/".join(directory.resolve().parts[-2:])


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One target, maybe a draft, and how they run.

    `mode` off decodes plainly; sync grows a token tree, then verifies it, in every step; async has drafts grow
    trees elsewhere meanwhile: `draft_workers` processes on `draft_cores`, or the pools that listen at `draft_pool`
    (with `draft_key`, a key file, and `draft_pool_key`, each pool's public key, where they have keys).
    `draft_optional` serves without pools that cannot be had; otherwise they are an error.

    `drafter` is one of, or several joined by +: lm (the draft), ngram (lookup of the last `ngram_max` to `ngram_min`
    tokens in the sequence), suffix (lookup in it and in past responses, of which `max_cached_tokens` tokens are kept).
    A step verifies at most `nodes` nodes of a sequence. In sync the draft grows a tree in at most `levels` forwards of
    `width` leaves; in async up to `wanted` nodes of a sequence, by forwards of `leaves` leaves of all sequences
    together. `budget` auto spends of that what pays by measured costs, down to plain decoding; fixed spends all of it,
    always.

    `kv_slots` tokens fit into the target's KV pool (and into the draft's); 0: what `max_requests` sequences can use
    and `memory` GiB hold, or, where that is 0 too, most of what is available. `max_rows` rows fit into one forward,
    `max_requests` sequences run at a time. A prompt and its output have at most `max_model_len` tokens together; 0: as
    many as the target's context. `quantization` is that of the weights of target and draft. `pace` holds
    their forwards back to the speed of other devices. `trace` is a file for a timeline of all steps and levels.
    `eager` runs transformers' own torch operations instead of kernels and CUDA graphs: the reference.
    """

    target: Path
    draft: Path | None = None
    mode: Mode = "off"
    drafter: str = "lm+ngram"
    nodes: int = 8
    levels: int = 8
    width: int = 2
    ngram_min: int = 1
    ngram_max: int = 4
    wanted: int = 2048
    leaves: int = 32
    draft_workers: int = 1
    draft_cores: str = ""  # as `cores`; "": some of those that the process may use, the target gets the rest
    draft_pool: tuple[str, ...] = ()
    draft_pool_key: tuple[str, ...] = ()
    draft_key: Path | None = None
    draft_optional: bool = False
    insecure: bool = False  # pools on other hosts may do without keys
    budget: BudgetKind = "auto"
    dtype: DType = "bfloat16"
    quantization: Quantization = "none"
    device: str = "cpu"
    threads: int = 0  # 0: as many as cores
    cores: str = ""  # as in "0,2-3"; "": all that the process may use
    kv_slots: int = 0  # 0: planned
    memory: float = 0.0  # GiB; 0: most of what is available
    max_rows: int = 256
    max_requests: int = 32
    max_model_len: int = 0  # 0: the target's context
    max_cached_tokens: int = 1 << 17
    trace: Path | None = None
    pace: str = ""  # as in "target=10.4ms,draft=2.6ms"; "": not paced
    eager: bool = False

    def __post_init__(self) -> None:
        kinds = (("mode", Mode), ("budget", BudgetKind), ("dtype", DType), ("quantization", Quantization))
        for field, kind in kinds:
            if getattr(self, field) not in get_args(kind):
                raise ParameterError(field, getattr(self, field), " or ".join(get_args(kind)))
        limits = (
            ("nodes", 1, 1024),
            ("levels", 1, 64),
            ("width", 1, 256),
            ("ngram_min", 1, 16),
            ("ngram_max", self.ngram_min, 16),
            ("wanted", 1, 1 << 16),
            ("leaves", 1, 1024),
            ("draft_workers", 1, 64),
            ("threads", 0, 1024),
            ("max_rows", 1, 1 << 16),
            ("max_requests", 1, 1 << 12),
            ("max_model_len", 2 if self.max_model_len else 0, 1 << 26),
            ("max_cached_tokens", 2, 1 << 26),
        )
        for field, low, high in limits:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ParameterError(field, value, f"an integer {low} to {high}")
        self._check_memory()
        parse_cores(self.cores)
        Paces.parse(self.pace)
        if self.trace is not None and not self.trace.parent.is_dir():
            raise ParameterError("trace", str(self.trace), "a file in a directory that exists")
        if self.draft_pool and self.mode != "async":
            raise ParameterError("mode", self.mode, "async with draft_pool")
        needs_draft = "lm" in self.drafters  # which checks them
        if (
            needs_draft
            and self.draft is None
            and (self.mode == "sync" or (self.mode == "async" and not self.draft_pool))
        ):
            allowed = f"a model directory for drafter {self.drafter}, or a drafter without lm"
            raise ParameterError("draft", None, allowed)
        if self.mode == "async" and not needs_draft:
            raise ParameterError("drafter", self.drafter, "a drafter with lm in mode async; the others need no process")

    def _check_memory(self) -> None:
        slots, memory = self.kv_slots, self.memory
        if not isinstance(slots, int) or isinstance(slots, bool) or not (slots == 0 or 64 <= slots <= 1 << 26):
            raise ParameterError("kv_slots", slots, f"0, or an integer 64 to {1 << 26}")
        if not isinstance(memory, int | float) or isinstance(memory, bool) or not 0 <= memory <= 1 << 20:
            raise ParameterError("memory", memory, f"a number of GiB, 0 to {1 << 20}")

    @property
    def drafters(self) -> tuple[DrafterKind, ...]:
        return drafter_kinds(self.drafter)

    @property
    def core_set(self) -> frozenset[int]:
        """The cores to run on; empty: as the process is."""
        return parse_cores(self.cores)

    @property
    def paces(self) -> Paces:
        return Paces.parse(self.pace)

    @property
    def num_threads(self) -> int:
        return self.threads or len(self.core_set) or available_cores()


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A draft pool: `model` (an EngineConfig whose target is the draft) that listens for targets at `listen`.

    `key` and `allow`, a key file and an allowlist, say who may come; without them only this host's processes may,
    unless `insecure`. A level expands up to `leaves` nodes of all sequences together; each gets `children`.
    """

    model: EngineConfig
    listen: str
    name: str = "draft"
    key: Path | None = None
    allow: Path | None = None
    insecure: bool = False
    leaves: int = EngineConfig.leaves
    children: int = 12

    def __post_init__(self) -> None:
        for field, high in (("leaves", 1024), ("children", 64)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
                raise ParameterError(field, value, f"an integer 1 to {high}")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a target is served over HTTP.

    It answers to any of `served_model_name`; none: to the target's own name. A body has at most `max_body_bytes`, a
    request at most `max_prompts` prompts and `max_n` outputs of each. One that gives no limit gets
    `default_max_tokens` tokens (0: what the context leaves). Its head, and then its body, must be there after
    `read_timeout` seconds. It is ended after `request_timeout` seconds, once its reader takes nothing for
    `write_timeout` seconds, and `drain_timeout` seconds after the server was told to end. A target that is silent for
    `target_timeout` seconds, as a stopped process is, is killed and started again.
    `metrics` is what a response says about its speculation unless the request asks for more. `chat_template` replaces
    that of the model. `generation_config` auto samples as the model's generation_config.json says where a request does
    not; vllm does not.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_prompts: int = 64
    max_n: int = 16
    default_max_tokens: int = 0
    read_timeout: float = 30.0
    request_timeout: float = 600.0
    write_timeout: float = 30.0
    drain_timeout: float = 30.0
    target_timeout: float = 30.0
    metrics: MetricsLevel = "none"
    chat_template: str | None = None
    generation_config: GenerationDefaults = "auto"

    def __post_init__(self) -> None:
        limits = (
            ("port", 0, 65535),
            ("max_body_bytes", 1024, 1 << 30),
            ("max_prompts", 1, 1 << 12),
            ("max_n", 1, MAX_SAMPLES),
            ("default_max_tokens", 0, 1 << 31),
        )
        for field, low, high in limits:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ParameterError(field, value, f"an integer {low} to {high}")
        for field in ("read_timeout", "request_timeout", "write_timeout", "drain_timeout", "target_timeout"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 86400:
                raise ParameterError(field, value, "a number of seconds, more than 0 and at most 86400")
        if self.target_timeout < MIN_TARGET_TIMEOUT:
            allowed = f"at least {MIN_TARGET_TIMEOUT:g} seconds: a target is heard twice in each"
            raise ParameterError("target_timeout", self.target_timeout, allowed)
        for field, kind in (("metrics", MetricsLevel), ("generation_config", GenerationDefaults)):
            if getattr(self, field) not in get_args(kind):
                raise ParameterError(field, getattr(self, field), " or ".join(get_args(kind)))
        if not self.host:
            raise ParameterError("host", self.host, "a host name or address")
        if not all(self.served_model_name):
            raise ParameterError("served_model_name", self.served_model_name, "names of at least one character")
