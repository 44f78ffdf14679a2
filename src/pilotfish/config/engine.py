from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pilotfish.config import fields
from pilotfish.config.fields import KEYS, TOKENS, BudgetKind, DType, KVDType, Mode, Quantization, Texts, limit
from pilotfish.config.hardware.pace import Paces
from pilotfish.core.features.features import FeatureType
from pilotfish.errors import ParameterError
from pilotfish.options import check_options, option, refuse_unknown

#: Rows of a prefill worker's forward, which reads all weights and has no decoding neighbours.
PREFILL_ROWS = 2048
#: Fields that have their defaults in a process beside this one: it drafts nothing itself, and has neither tiers nor
#: workers or pools of its own.
ALONE = (
    *("mode", "draft", "draft_pool", "draft_pools_each", "shadow_pool", "shadow_pool_key", "members", "prefill_pool"),
    *("prefill_workers", "tensor_parallel", "kv_host_memory", "kv_disk", "kv_disk_size"),
)
#: Ours, and vLLM's.
KV_DTYPE = ("--kv-dtype", "--kv-cache-dtype")
KV_HOST = ("--kv-host-memory", "--kv-offloading-size")
PREFIX_CACHE = ("--prefix-cache/--no-prefix-cache", "--enable-prefix-caching/--no-enable-prefix-caching")
RANKS = ("--tensor-parallel-size",)
MAX_REQUESTS, MAX_ROWS = ("--max-requests", "--max-num-seqs"), ("--max-rows", "--max-num-batched-tokens")

LAYERS: Any = {"parse": fields.layer_ids, "metavar": "ID,…", "shown": "as it says"}
CONTEXT: Any = {"or_zero": True, "shown": "the model's context", **TOKENS}
GIB: Any = {"low": 0, "high": 1 << 20, "unit": "GiB"}

#: Groups of options in the help of commands.
speculation = partial(option, panel="Speculation")
elsewhere = partial(option, panel="Drafts in processes of their own (--mode async)")
ahead = partial(option, panel="Prefill in processes of its own")
machine = partial(option, panel="Device and memory")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """A target, an optional draft, and how they run. Fields without help text have no command-line option.

    `mode` off decodes plainly; sync grows a token tree, then verifies it, in every step; async has drafts grow trees
    elsewhere at the same time: in `draft_workers` on `draft_cores`, in the pools at `draft_pool`, or in those that the
    file `members` names while the target runs (`members.py`). `draft_pools_each` of the pools guess for a sequence, and
    their trees are merged. A draft grows up to `wanted` nodes of a sequence. `drafter` lm is the draft; ngram looks up
    the last tokens in the sequence, suffix in past responses too, of which it keeps `max_cached_tokens`. A trained head
    as draft needs `features` of the target, made for the head of that name or for this engine's own drafts
    (`engine/tapping.py`). Pools at `shadow_pool` get `shadow_share` of the requests once these have ended; their
    guesses are only scored. `budget` auto spends as much of `nodes` and `levels` as pays by measured costs; fixed, all.

    `prefill_workers` on `prefill_cores`, or pools at `prefill_pool`, compute KV of prompts where that is faster or, if
    `prefill_threshold` is a number, where so many tokens lack it. KV crosses by the first of `prefill_transports`
    available, else over the socket.

    Each of `tensor_parallel` ranks holds a part of the target's weights and KV; drafts are whole. `kv_slots` and
    `memory` bind each process that has a model. Where both are 0 the KV pool holds what `max_requests` sequences can
    use, within most of the memory that is available, or within `allotted` bytes where prefill workers are started
    beside the target (`host_memory.py`). `eager` runs transformers' own torch operations."""

    target: Annotated[Path, option("A model: a directory, or a GGUF file.", names=("--target", "--model"))]
    draft: Annotated[Path, option("A draft's directory, with a target.")] | None = None
    mode: Annotated[Mode, option("off, sync or async; by default as the draft allows.")] = "off"
    dtype: Annotated[DType, option("float32, bfloat16, float16 on CUDA, or auto: by the machine.")] = "auto"
    max_model_len: Annotated[int, option("Of prompt and output, at most.", 2, 1 << 26, **CONTEXT)] = 0
    drafter: Annotated[str, speculation("lm, ngram, suffix, or several joined by +.")] = "lm+ngram"
    nodes: Annotated[int, speculation("Nodes of a token tree, at most.", 1, 1024)] = 8
    levels: Annotated[int, speculation("Draft forwards that grow a tree, at most.", 1, 64)] = 8
    width: Annotated[int, speculation("Leaves that a draft forward expands, in sync.", 1, 256)] = 2
    budget: Annotated[BudgetKind, speculation("auto: guess as much as pays; fixed: always all.")] = "auto"
    ngram_min: Annotated[int, speculation("Tokens that n-gram lookup matches, at least.", 1, 16)] = 1
    ngram_max: Annotated[int, speculation("And at most.", 1, 16)] = 4
    draft_layers: Annotated[tuple[int, ...], speculation("Hidden states that a trained head takes.", **LAYERS)] = ()
    wanted: Annotated[int, option("", 1, 1 << 16)] = 2048
    max_cached_tokens: Annotated[int, option("", 2, 1 << 26)] = 1 << 17
    leaves: Annotated[int, elsewhere("Leaves that a draft forward expands.", 1, 1024)] = 32
    draft_workers: Annotated[int, elsewhere("Draft processes.", 1, 64)] = 1
    draft_cores: Annotated[str, elsewhere("Their cores.", shown="a few")] = ""
    draft_device: Annotated[str, elsewhere("Their device.", shown="that of --device")] = ""
    draft_pool: Annotated[Texts, elsewhere("Pools instead: ipc://… or tcp://…, joined by ,", **fields.ADDRESSES)] = ()
    draft_pools_each: Annotated[int, elsewhere("Pools that guess for a sequence at once.", 1, 8)] = 1
    draft_key: Annotated[Path, elsewhere("This target's key file, for pools with keys.")] | None = None
    draft_pool_key: Annotated[Texts, elsewhere("The pools' public keys, joined by a space.", **KEYS)] = ()
    members: Annotated[Path, elsewhere("A file of draft and prefill pools, which may change at any time.")] | None = (
        None
    )
    shadow_pool: Annotated[
        Texts, elsewhere("Pools to score without using them, in any mode, joined by ,", **fields.ADDRESSES)
    ] = ()
    shadow_pool_key: Annotated[Texts, elsewhere("Their public keys, joined by a space; with --draft-key.", **KEYS)] = ()
    shadow_share: Annotated[float, elsewhere("Of the requests that they are told of.", high=1, above=0)] = 1.0
    draft_optional: Annotated[bool, elsewhere("Serve without a pool that fails.")] = False
    features: Annotated[Path, elsewhere("A trained head that pools may draft with.")] | None = None
    feature_dtype: Annotated[
        FeatureType, elsewhere("Features go to trained heads as float32, bfloat16, fp8 or int8.")
    ] = "bfloat16"
    insecure: Annotated[bool, elsewhere("Do without keys beyond this host.")] = False
    prefill_workers: Annotated[int, ahead("Processes that compute KV of prompts.", 0, 64)] = 0
    prefill_cores: Annotated[str, ahead("Their cores.", shown="half of the target's")] = ""
    prefill_pool: Annotated[Texts, ahead("Pools instead: ipc://… or tcp://…, joined by ,", **fields.ADDRESSES)] = ()
    prefill_threshold: Annotated[
        str, ahead("Tokens without KV from which on a prompt goes there; auto: as measured.", metavar="TOKENS")
    ] = "auto"
    prefill_transports: tuple[str, ...] = ("shm", "nixl")
    prefill_key: Annotated[Path, ahead("This target's key file, for pools with keys.")] | None = None
    prefill_pool_key: Annotated[Texts, ahead("The pools' public keys, joined by a space.", **KEYS)] = ()
    quantization: Annotated[Quantization, machine("Weights: none, int8, or fp8 on CUDA.")] = "none"
    kv_dtype: Annotated[KVDType, machine("KV: int8, fp8 on CUDA, or auto: as --dtype.", names=KV_DTYPE)] = "auto"
    tensor_parallel: Annotated[int, machine("Processes that share the target's weights.", 1, 64, names=RANKS)] = 1
    device: Annotated[str, machine("cpu, or cuda where there is one.")] = "cpu"
    threads: Annotated[int, machine("CPU threads; 0: all cores of this process.", 0, 1024)] = 0
    cores: Annotated[str, machine("Cores to run on, as in 0,2-3.", shown="all")] = ""
    kv_slots: Annotated[int, machine("Tokens that fit into the KV pool; 0: planned.", 64, 1 << 26, or_zero=True)] = 0
    memory: Annotated[float, machine("GiB to stay within; 0: most of what is free.", **GIB)] = 0.0
    allotted: Annotated[int, option("", 0, 1 << 50)] = 0
    pace: Annotated[str, machine("Emulate devices, as in target=10.4ms,draft=2.6ms.")] = ""
    trace: Annotated[Path, machine("Write a timeline of steps and levels to this file.")] | None = None
    prefix_cache: Annotated[bool, machine("Keep KV for requests that begin alike.", names=PREFIX_CACHE)] = True
    kv_host_memory: Annotated[
        float, machine("KV kept in host memory beyond the pool; 0: none.", names=KV_HOST, **GIB)
    ] = 0.0
    kv_disk: Annotated[Path, machine("A directory for KV, kept beyond restarts.")] | None = None
    kv_disk_size: Annotated[float, machine("Of what is in it, at most.", shown="16", **GIB)] = 0.0
    eager: Annotated[bool, machine("The reference: plain torch operations, no C++ kernels.")] = False
    max_requests: Annotated[int, limit("Sequences that run at a time.", 1, 1 << 12, names=MAX_REQUESTS)] = 32
    max_rows: Annotated[int, limit("Of a forward, guesses included.", 1, 1 << 16, names=MAX_ROWS, **TOKENS)] = 256

    def __post_init__(self) -> None:
        check_options(self)
        if self.ngram_max < self.ngram_min:
            raise ParameterError("ngram_max", self.ngram_max, f"an integer {self.ngram_min} to 16")
        for name in ("kv_host_memory", "kv_disk"):
            if getattr(self, name) and not self.prefix_cache:
                raise ParameterError("prefix_cache", False, f"true with {name}")
        if self.kv_disk_size and self.kv_disk is None:
            raise ParameterError("kv_disk_size", self.kv_disk_size, "0 without kv_disk")
        fields.parse_cores(self.cores)
        if self.prefill_pool and self.prefill_workers:
            raise ParameterError("prefill_workers", self.prefill_workers, "0 with prefill_pool")
        for name in ("draft_pool", "draft_pool_key", "prefill_workers", "prefill_pool", "prefill_pool_key"):
            if self.members is not None and (given := getattr(self, name)):
                raise ParameterError(name, given, "nothing with members, a file that names all pools and their keys")
        fields.least_sent(self.prefill_threshold)
        if self.tensor_parallel > 1:
            for name in ("kv_host_memory", "kv_disk", "prefill_pool", "prefill_workers"):
                if given := getattr(self, name):
                    raise ParameterError("tensor_parallel", self.tensor_parallel, f"1 with {name} {given}")
        for name in ("draft_pool", "shadow_pool", "prefill_pool"):
            pools: tuple[str, ...] = getattr(self, name)
            if len(set(pools)) < len(pools):
                raise ParameterError(name, ",".join(pools), "each pool once")
        self._check_shadows()
        Paces.parse(self.pace)
        if self.trace is not None and not self.trace.parent.is_dir():
            raise ParameterError("trace", str(self.trace), "a file in a directory that exists")
        if self.draft_pool and self.mode != "async":
            raise ParameterError("mode", self.mode, "async with draft_pool")
        if self.members is None and self.draft_pools_each > max(len(self.draft_pool), 1):
            allowed = f"at most {max(len(self.draft_pool), 1)}, the number of pools in draft_pool"
            raise ParameterError("draft_pools_each", self.draft_pools_each, allowed)
        needs_draft = "lm" in self.drafters  # which checks them
        if needs_draft and (self.mode == "sync" or self.starts_drafts) and self.draft is None:
            allowed = f"a model directory for drafter {self.drafter}, or a drafter without lm"
            raise ParameterError("draft", None, allowed)
        if self.mode == "async" and not needs_draft:
            raise ParameterError("drafter", self.drafter, "a drafter with lm in mode async; the others need no process")

    def _check_shadows(self) -> None:
        if live := set(self.shadow_pool) & set(self.draft_pool):
            raise ParameterError("shadow_pool", min(live), "a pool that is not in draft_pool")
        if self.shadow_pool_key and self.draft_key is None:
            raise ParameterError("draft_key", None, "a key file, with shadow_pool_key")
        if len(self.shadow_pool_key) not in (0, len(self.shadow_pool)):
            allowed = f"one public key for each of {len(self.shadow_pool)} pools of shadow_pool, or none"
            raise ParameterError("shadow_pool_key", list(self.shadow_pool_key), allowed)

    @property
    def drafters(self) -> tuple[fields.DrafterKind, ...]:
        return fields.drafter_kinds(self.drafter)

    @property
    def core_set(self) -> frozenset[int]:
        return fields.parse_cores(self.cores)

    @property
    def paces(self) -> Paces:
        return Paces.parse(self.pace)

    @property
    def of_draft(self) -> "EngineConfig":
        """For a draft worker's process, whose parent has pinned it to its cores."""
        assert self.draft is not None  # as in every mode that starts one
        reset = ("features", "allotted", "cores", "threads", "max_model_len", "max_rows", "draft_device")
        return self._beside(*reset, target=self.draft, device=self.draft_device or self.device)

    def of_small(self, target: Path, **own: Any) -> "EngineConfig":
        """For a smaller model beside this one, without speculation. `own` replaces fields that are planned anew."""
        planned = ("max_model_len", "kv_slots", "memory", "allotted", "pace")
        return self._beside("features", "trace", *planned, **{"target": target, **own})

    @property
    def of_prefill(self) -> "EngineConfig":
        return self._beside("cores", "threads", max_rows=max(self.max_rows, PREFILL_ROWS))

    def of_rank(self, rank: int) -> "EngineConfig":
        device = f"cuda:{rank}" if self.device == "cuda" else self.device
        kept = {"tensor_parallel": self.tensor_parallel, "device": device}
        return self._beside("features", "cores", "pace", "trace", **kept)

    def _beside(self, *reset: str, **own: Any) -> "EngineConfig":
        """For a process beside this one: defaults for ALONE and `reset`, then `own`."""
        return replace(self, **{name: getattr(EngineConfig, name) for name in (*ALONE, *reset)} | own)

    @property
    def starts_drafts(self) -> bool:
        return self.mode == "async" and not self.draft_pool and self.members is None

    @property
    def prefills_elsewhere(self) -> bool:
        """Whether prefill workers or pools compute KV of prompts, or may join later."""
        may_come = self.members is not None and self.tensor_parallel == 1
        return bool(self.prefill_pool or self.prefill_workers or may_come)

    @property
    def num_threads(self) -> int:
        return self.threads or len(self.core_set) or fields.available_cores()
