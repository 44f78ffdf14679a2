"""How a quantized checkpoint stores its weights, by what its config.json says. Imports no torch."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from pilotfish.errors import ModelError
from pilotfish.model.loading.metadata import read_object

#: The file explains itself.
_FIELDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("quantization.toml").read_text("utf-8"))
#: The tensors of a weight: `packed_tensors.NAMES`.
Layout = Literal["float8", "int8", "words", "columns", "interleaved", "blocks"]
#: Of compressed-tensors' formats, types and bits.
_LAYOUTS: dict[tuple[Any, ...], Layout] = {
    **{(f"{name}-quantized", "float", 8): "float8" for name in ("float", "naive")},
    **{(f"{name}-quantized", "int", 8): "int8" for name in ("int", "naive")},
    **{("pack-quantized", "int", bits): "words" for bits in (4, 8)},
}


@dataclass(frozen=True)
class Scheme:
    layout: Layout
    bits: int
    outputs: int = 1  # that share a scale; 0: all
    inputs: int = 0  # likewise
    zeros: bool = False  # whether a scale has a zero point, other than the middle of the codes
    ordered: bool = False  # whether the files must say that inputs are in order


def quant_method(fields: Mapping[str, Any]) -> str:
    """Empty for weights that are not quantized."""
    about = fields.get("quantization_config") or {"quant_method": ""}
    return str(about.get("quant_method") if isinstance(about, dict) else about)


def scheme_of(directory: Path) -> Scheme | None:
    """None: weights are not quantized, or in GGUF. ModelError, naming the field, for what is not served."""
    path = directory / "config.json"
    fields = read_object(path)
    if (method := quant_method(fields)) in ("", "gguf"):
        return None
    if method not in _FIELDS:
        supported = f"{', '.join(_FIELDS)} and GGUF files are supported, or float32, float16 or bfloat16 weights"
        raise ModelError(f"model: {directory} has weights quantized by {method}; {supported}")
    given = dict(_flat(fields["quantization_config"], path))
    for name, value in given.items():
        _refuse(path, name, value, **_FIELDS[method])
    return _scheme(method, given, path)


def _flat(fields: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if name == "config_groups":
            if (
                not isinstance(value, dict)
                or len(value) != 1
                or not isinstance(group := next(iter(value.values())), dict)
            ):
                raise _refused(path, name, value, "one group")
            yield from ((inner, part) for inner, part in _flat(group, path) if (inner, part) != ("format", None))
        elif isinstance(value, dict):
            yield from ((f"{name}.{inner}", part) for inner, part in value.items())
        elif name != "quant_method":
            yield name, value


def _refuse(path: Path, name: str, value: Any, idle: list[str], allowed: dict[str, list[Any]]) -> None:
    if name in allowed:
        if value is not None and (value.lower() if isinstance(value, str) else value) not in allowed[name]:
            raise _refused(path, name, value, ", ".join(map(repr, allowed[name])))
    elif value and not any(fnmatch(name, pattern) for pattern in idle):
        raise _refused(path, name, value, "null")


def _refused(path: Path, name: str, value: Any, allowed: str) -> ModelError:
    given = f"{path}: quantization_config.{name}: {repr(value)[:100]}"
    return ModelError(f"model: {given} is not supported; allowed: {allowed}")


def _size(given: Mapping[str, Any], path: Path, name: str, default: int = 0) -> int:
    """Of groups; of -1, which is a whole row, 0."""
    value = given.get(name, default)
    if type(value) is not int or value < -1 or value == 0:
        raise _refused(path, name, value, "-1 or a positive integer")
    return max(value, 0)


def _block(given: Mapping[str, Any], path: Path, name: str) -> list[int]:
    value = given.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise _refused(path, name, value, "two positive integers")
    return value


def _scheme(method: str, given: Mapping[str, Any], path: Path) -> Scheme:
    match method:
        case "fp8":  # without blocks by tensors or outputs, as the files have scales
            name = "weight_block_size"
            return Scheme("float8", 8, *(_block(given, path, name) if given.get(name) else (0, 0)))
        case "awq":
            return Scheme("interleaved", 4, 1, _size(given, path, "group_size", 128), zeros=True)
        case "gptq":
            bits, symmetric = _size(given, path, "bits"), given.get("sym", True)
            size, ordered = _size(given, path, "group_size", 128), bool(given.get("desc_act"))
            return Scheme("columns", bits, 1, size, zeros=not symmetric, ordered=ordered)
        case "mxfp4":
            return Scheme("blocks", 4, 1, 32)
    kind = given.get("format"), given.get("weights.type", "int"), given.get("weights.num_bits", 8)
    if kind not in _LAYOUTS:
        allowed = ", ".join(f"{name} of {bits} bits ({of})" for name, of, bits in _LAYOUTS)
        raise _refused(path, "format", f"{kind[0]} of {kind[2]} bits ({kind[1]})", allowed)
    symmetric = given.get("weights.symmetric", True)
    if not symmetric and kind[1] == "float":
        raise _refused(path, "weights.symmetric", False, "True with floats")
    match given.get("weights.strategy"):
        case "group":
            sizes = [1, _size(given, path, "weights.group_size")]
        case "block":
            sizes = _block(given, path, "weights.block_structure")
        case strategy:
            sizes = [int(strategy != "tensor"), 0]
    return Scheme(_LAYOUTS[kind], int(kind[2]), sizes[0], sizes[1], not symmetric)
