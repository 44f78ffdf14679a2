"""Makes a model as costly as a larger one without changing its results.

Every layer's FFN gets neurons whose inputs are random and whose outputs are multiplied by zero:

    down · (silu(gate · x) * up · x)        gate, up [+n, hidden] random     down [hidden, +n] zero

In real arithmetic the added terms are exactly 0; the work and the bytes read are those of the larger model.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.errors import ParameterError

SEED = 0
MULTIPLE = 128  # of FFN neurons: matrix kernels run on whole tiles
SHARD_BYTES = 1 << 30


def inflated(directory: Path, millions: int) -> Path:
    """Written on first use. ParameterError for fewer `millions` than the model has."""
    config = json.loads((directory / "config.json").read_text())
    files = sorted(directory.glob("*.safetensors"))
    weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
    parameters = sum(tensor.numel() for tensor in weights.values())
    ffn = _ffn(config, parameters, millions)
    cached = cache_folder("pairs") / f"{directory.parent.name}-{millions}m-{_digest(directory)}"
    fields = config | {"intermediate_size": ffn, "dtype": "bfloat16"}
    return made_once(cached, lambda made: _write(made, directory, fields, weights))


def _ffn(config: Mapping[str, int], parameters: int, millions: int) -> int:
    per_neuron = 3 * config["hidden_size"] * config["num_hidden_layers"]
    missing = (millions * 1_000_000 - parameters) / per_neuron
    ffn = MULTIPLE * round((config["intermediate_size"] + missing) / MULTIPLE)
    if missing < 0 or ffn < config["intermediate_size"]:
        raise ParameterError("pair", f"@{millions}m", f"{math.ceil(parameters / 1_000_000)}m or more")
    return ffn


def _write(made: Path, directory: Path, config: Mapping[str, int], weights: dict[str, Tensor]) -> None:
    shutil.copytree(directory, made, ignore=shutil.ignore_patterns("*.safetensors*", "README.md"))
    (made / "config.json").write_text(json.dumps(config, indent=2))
    ffn, generator = config["intermediate_size"], torch.Generator().manual_seed(SEED)
    grown = {name: _grow(name, tensor, ffn, generator) for name, tensor in sorted(weights.items())}
    save_torch_state_dict(grown, made, max_shard_size=SHARD_BYTES)


def _grow(name: str, tensor: Tensor, ffn: int, generator: torch.Generator) -> Tensor:
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        std = tensor.float().std().item()
        rows = torch.empty(ffn - tensor.shape[0], tensor.shape[1], dtype=torch.bfloat16)
        return torch.cat([tensor.bfloat16(), rows.normal_(0, std, generator=generator)])
    if name.endswith("down_proj.weight"):
        zeros = torch.zeros(tensor.shape[0], ffn - tensor.shape[1], dtype=torch.bfloat16)
        return torch.cat([tensor.bfloat16(), zeros], dim=1)
    return tensor.bfloat16()


def _digest(directory: Path) -> str:
    digest = hashlib.sha256(f"{SEED} {MULTIPLE}".encode())
    for path in sorted(directory.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
