from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import TOKENS, Backend
from pilotfish.core.prefilling.segments import SEGMENT_BYTES
from pilotfish.errors import ParameterError
from pilotfish.options import check_options, count, option, refuse_unknown

#: Characters of a draft's revision.
MAX_REVISION = 128
#: Options of a pool's model.
POOL_MODEL = (
    *("dtype", "quantization", "kv_dtype", "device", "threads", "cores"),
    *("kv_slots", "memory", "pace", "trace", "prefix_cache", "eager", "draft_layers"),
)
#: Options of our engine alone, and their values with another engine.
NOT_ELSEWHERE = {"quantization": "none", "kv_dtype": "auto", "eager": False, "device": "cpu", "memory": 0.0}
#: How names of GGUF files end.
GGUF = ".gguf"
#: Further options of a prefill pool.
OF_PREFILLS = ("max_model_len", "max_rows", "features")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """`model`, the draft, serves targets that connect to `listen`. Without `key` and `allow` only this host's processes
    may connect, unless `insecure`. A trained head shares the tokenizer, embeddings and output layer of `target`.
    `backend` names another engine (`backends/`); llama.cpp also reads a GGUF file."""

    model: EngineConfig
    listen: Annotated[str, option("ipc://PATH or tcp://HOST:PORT.")]
    target: Annotated[Path, option("The target of a draft that is a trained head.")] | None = None
    target_tokenizer: Annotated[
        tuple[Path, ...], option("A directory with the tokenizer of targets that are served through a map.")
    ] = ()
    name: Annotated[str, option("What ps and logs call it.")] = "draft"
    revision: Annotated[str, option("Of the draft, for targets' metrics.", most=MAX_REVISION)] = ""
    key: Annotated[Path, option("This pool's key file, as `pilotfish keys new` makes it.")] | None = None
    allow: Annotated[Path, option("The allowlist: who may come, and their weights.")] | None = None
    insecure: Annotated[bool, option("Listen beyond this host without keys.")] = False
    leaves: Annotated[int, option("Nodes that a forward expands.", 1, 1024)] = EngineConfig.leaves
    children: Annotated[int, option("Children that an expanded node gets.", 1, 64)] = 12
    backend: Annotated[Backend, option("Whose engine runs the draft: pilotfish, llama.cpp or openvino.")] = "pilotfish"
    backend_device: Annotated[
        str, option("The engine's: CPU, GPU of openvino; cpu or gpu of llama.cpp.", shown="its CPU")
    ] = ""
    tokenizer: Annotated[Path, option("Directory of a GGUF file's tokenizer.", shown="beside it")] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.is_gguf and self.backend != "llama.cpp":
            raise ParameterError("backend", self.backend, f"llama.cpp: {self.model.target} is a GGUF file")
        if self.tokenizer is not None and not self.is_gguf:
            raise ParameterError("tokenizer", str(self.tokenizer), f"nothing: {self.model.target} is no GGUF file")
        if self.backend == "pilotfish" and self.backend_device:
            raise ParameterError("backend_device", self.backend_device, "nothing with backend pilotfish; see device")
        for name, usual in NOT_ELSEWHERE.items() if self.backend != "pilotfish" else ():
            if (given := getattr(self.model, name)) != usual:
                raise ParameterError(name, given, f"{usual} with backend {self.backend}")

    @property
    def is_gguf(self) -> bool:
        return self.model.target.suffix == GGUF

    @property
    def tokenizer_directory(self) -> Path:
        target = self.model.target
        return self.tokenizer or (target.parent if self.is_gguf else target)


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """`model` computes KV of prompts for targets of the same model that connect to `listen`, and keeps it in
    `segment_memory` until taken. Without `key` and `allow` only this host's processes connect, unless `insecure`."""

    model: EngineConfig
    listen: Annotated[str, option("ipc://PATH or tcp://HOST:PORT.")]
    name: Annotated[str, option("What ps and logs call it.")] = "prefill"
    key: Annotated[Path, option("This pool's key file, as `pilotfish keys new` makes it.")] | None = None
    allow: Annotated[Path, option("The allowlist: who may come, and their weights.")] | None = None
    insecure: Annotated[bool, option("Listen beyond this host without keys.")] = False
    segment_memory: Annotated[float, option("GiB for KV that is not taken yet.", 0.001, 1 << 10, unit="GiB")] = 0.25
    segment_bytes: Annotated[
        int, option("Of KV that is sent at a time, at most.", 1 << 12, 1 << 23, parse=count, metavar="BYTES")
    ] = SEGMENT_BYTES
    max_queued_tokens: Annotated[int, option("Of one target's prompts that wait.", 1, 1 << 31, **TOKENS)] = 1 << 17
    lease: Annotated[float, option("Seconds that KV is kept for a silent target.", 1, 3600, unit="seconds")] = 10.0
    nixl: Annotated[bool, option("Offer KV over NIXL too, which asks nobody for a key.")] = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.segment_memory * (1 << 30) < 2 * self.segment_bytes:
            raise ParameterError("segment_memory", self.segment_memory, f"room for two of {self.segment_bytes} bytes")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """`engine` serves servers that connect to `listen`. Without `key` and `allow` only this host's processes may
    connect, unless the engine is `insecure`."""

    engine: EngineConfig
    listen: Annotated[str, option("ipc://PATH or tcp://HOST:PORT.")]
    name: Annotated[str, option("What ps and logs call it.")] = "target"
    key: Annotated[Path, option("This target's key file, as `pilotfish keys new` makes it.")] | None = None
    allow: Annotated[Path, option("The allowlist: which servers may come.")] | None = None

    def __post_init__(self) -> None:
        check_options(self)
