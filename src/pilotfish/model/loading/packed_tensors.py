"""Tensors of quantized checkpoints as weights in groups. Codes of four bits lie eight to an int32, the first lowest:

float8, int8  weight [N, K]; scales [N / outputs, K / inputs] of a scale; zero points likewise
words         weight_packed [N, K / 8]; weight_scale [N, groups], weight_zero_point [N / 8, groups], weight_shape [N, K]
columns       qweight [K / 8, N]; scales [groups, N], qzeros [groups, N / 8], less one; g_idx [K], the group of an input
interleaved   qweight [K, N / 8], outputs of a word in the order 0 2 4 6 1 3 5 7; scales, qzeros as above, not less one
blocks        blocks [experts, N, groups, 16] bytes of two e2m1; scales [experts, N, groups], exponents of 2, and 127
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from pathlib import Path

import torch
from torch import Tensor

from pilotfish.errors import ModelError
from pilotfish.model.grouped import GroupedWeight
from pilotfish.model.loading.schemes import Layout, Scheme

#: Of each tensor by its name: its file, and its shape and dtype as a tensor on the device `meta`.
Headers = Mapping[str, tuple[Path, Tensor]]
#: Dtypes of weights that can be served as they are.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

#: Endings of the names of a weight's tensors, by what they hold.
_SCALED = {"codes": ".weight", "scales": ".weight_scale", "zeros": ".weight_zero_point"}
_TURNED = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros"}
_ENDINGS: dict[Layout, dict[str, str]] = {
    "float8": {"codes": ".weight", "scales": ".weight_scale_inv"},  # or weight_scale
    "int8": _SCALED,
    "words": {**_SCALED, "codes": ".weight_packed", "shape": ".weight_shape"},
    "columns": {**_TURNED, "order": ".g_idx"},
    "interleaved": _TURNED,
    "blocks": {"codes": "_blocks", "scales": "_scales"},
}
_CODES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "blocks": torch.uint8}  # others: int32
#: Endings of names of tensors beside weights that say how activations were to be rounded.
_OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".activation_scale")

_COUNTED = torch.arange(-8, 8).float()
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_E8M0 = torch.tensor([2.0 ** (exponent - 127) for exponent in range(256)])  # the last is infinite; it stands for NaN
#: Places in an interleaved word of outputs in order.
_INTERLEAVED = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class PackedTensor:
    scheme: Scheme
    shape: tuple[int, ...]  # of the weight that it stands for
    names: dict[str, str]  # of its tensors, by what they hold

    @property
    def inputs(self) -> int:
        return self.shape[1]

    def weight(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> GroupedWeight:
        """Of its tensors; also on `meta`. Of experts outputs end to end."""
        codes, table = _codes(self.scheme, parts["codes"])
        if self.scheme.layout == "blocks":
            return GroupedWeight(codes, _E8M0[parts["scales"].flatten(0, 1).int()], dtype, table=table)
        scales = self._by_output(parts["scales"].T if _turned(self.scheme) else parts["scales"])
        if self.scheme.zeros:
            scales = scales.float()
            offsets = -self._by_output(self._zero_points(parts["zeros"])).float() * scales
            return GroupedWeight(codes, scales, dtype, offsets, table)
        halves = scales.dtype == torch.float16 and scales.shape[1] > 1
        return GroupedWeight(codes, scales if halves else scales.float(), dtype, table=table)

    def problems(self, parts: Mapping[str, Tensor], weight: GroupedWeight) -> Iterator[str]:
        """Values for which there is no such weight."""
        zeros, shape, order = (parts.get(part) for part in ("zeros", "shape", "order"))
        if not weight.scales.isfinite().all():
            yield f"{self.names['scales']} holds NaN or infinity"
        if self.scheme.layout == "float8" and (weight.codes.view(torch.int8) & 127 == 127).any():
            yield f"{self.names['codes']} holds NaN"
        if zeros is not None and not self.scheme.zeros and self._zero_points(zeros).any():
            yield f"{self.names['zeros']} holds zero points, and config.json says that weights are symmetric"
        if shape is not None and shape.tolist() != [*self.shape]:
            yield f"{self.names['shape']} is {shape.tolist()}; {[*self.shape]} is needed"
        size = self.scheme.inputs or self.inputs
        if order is not None and not order.equal(torch.arange(self.inputs).to(order) // size):
            yield f"{self.names['order']} orders inputs (desc_act); only groups of consecutive inputs are supported"

    def _by_output(self, factors: Tensor) -> Tensor:
        """[outputs, groups] in groups that divide the inputs."""
        rows, size = self.scheme.outputs or self.shape[0], self.scheme.inputs or self.inputs
        group = gcd(size, self.inputs)
        factors = factors.reshape(ceil(self.shape[0] / rows), -1).repeat_interleave(rows, dim=0)[: self.shape[0]]
        return factors.repeat_interleave(size // group, dim=1)[:, : self.inputs // group].contiguous()

    def _zero_points(self, found: Tensor) -> Tensor:
        """[outputs, groups], as the codes are: from their middle."""
        bits, middle = self.scheme.bits, 1 << self.scheme.bits - 1
        match self.scheme.layout:
            case "words":
                return _unpacked(found.T, bits).T[: self.shape[0]].int() - middle
            case "columns":
                return (_unpacked(found, bits).T[: self.shape[0]].int() + 1) % (2 * middle) - middle
            case "interleaved":
                return _ordered(found).T.int() - middle
        return found


def packed_tensors(headers: Headers, scheme: Scheme) -> dict[str, PackedTensor]:
    """By the names of the weights. ModelError for one with tensors that are missing or do not fit."""
    ending, found = _ENDINGS[scheme.layout]["codes"], dict[str, PackedTensor]()
    for name, (file, codes) in headers.items():
        if name.endswith(ending) and codes.dtype == _CODES.get(scheme.layout, torch.int32):
            base = name.removesuffix(ending)
            weight = base if scheme.layout == "blocks" else f"{base}.weight"
            if weight in headers and weight != name:
                raise ModelError(f"model: {file}: tensor {name} stands for {weight}, which is there too")
            found[weight] = _packed_tensor(headers, base, scheme)
    return found


def dense_headers(headers: Headers, packed: Mapping[str, PackedTensor]) -> Headers:
    """As if the checkpoint were not quantized."""
    gone = {name for one in packed.values() for name in one.names.values()}
    gone |= {name.removesuffix(".weight") + ending for name in packed for ending in _OF_ACTIVATIONS}
    left = {name: header for name, header in headers.items() if name not in gone}
    for name, one in packed.items():
        left[name] = headers[one.names["codes"]][0], torch.empty(one.shape, dtype=torch.bfloat16, device="meta")
    return left


def _packed_tensor(headers: Headers, base: str, scheme: Scheme) -> PackedTensor:
    names = {part: base + ending for part, ending in _ENDINGS[scheme.layout].items()}
    if scheme.layout == "float8" and f"{base}.weight_scale" in headers:
        names["scales"] = f"{base}.weight_scale"
    file, codes = headers[names["codes"]]
    if codes.ndim != (4 if scheme.layout == "blocks" else 2) or not codes.numel() or codes.shape[3:] not in ((), (16,)):
        wanted = "four dimensions, the last of 16," if scheme.layout == "blocks" else "two dimensions"
        raise ModelError(f"model: {file}: tensor {names['codes']} has shape {list(codes.shape)}; {wanted} are needed")
    shape, needed = _dense_shape(scheme, codes.shape), {"zeros": scheme.zeros, "order": scheme.ordered}
    if (group := gcd(scheme.inputs or shape[1], shape[1])) % 8:
        raise ModelError(f"model: {file}: tensor {names['codes']} has groups of {group} inputs, no multiple of 8")
    if not scheme.outputs and names["scales"] in headers and headers[names["scales"]][1].numel() > 1:
        scheme = replace(scheme, outputs=1)  # as the file has it
    for part, size in _shapes(scheme, shape, codes.shape).items():
        if names.get(part) in headers:
            _refuse_misfit(names[part], *headers[names[part]], size, _dtypes(scheme.layout, part))
        elif part in names and needed.get(part, True):
            raise ModelError(f"model: {file} lacks tensor {names[part]}, which {names['codes']} needs")
    return PackedTensor(scheme, shape, {part: name for part, name in names.items() if name in headers})


def _dense_shape(scheme: Scheme, codes: torch.Size) -> tuple[int, ...]:
    per = 1 if scheme.layout in _CODES else 32 // scheme.bits
    match scheme.layout:
        case "columns":
            return codes[1], codes[0] * per
        case "interleaved":
            return codes[1] * per, codes[0]
        case "blocks":
            return codes[0], codes[2] * 2 * codes[3], codes[1]
    return codes[0], codes[1] * per


def _shapes(scheme: Scheme, shape: tuple[int, ...], codes: torch.Size) -> dict[str, tuple[int, ...]]:
    """That tensors beside the codes need, but for dimensions of 1."""
    if scheme.layout == "blocks":
        return {"scales": codes[:3]}
    outputs, groups = ceil(shape[0] / (scheme.outputs or shape[0])), ceil(shape[1] / (scheme.inputs or shape[1]))
    words, turn = outputs if scheme.layout in _CODES else ceil(outputs * scheme.bits / 32), -1 if _turned(scheme) else 1
    return {"scales": (outputs, groups)[::turn], "zeros": (words, groups)[::turn], "shape": (2,), "order": shape[1:]}


def _dtypes(layout: Layout, part: str) -> Sequence[torch.dtype]:
    if part == "scales":
        return [torch.uint8] if layout == "blocks" else FLOATS
    return [_CODES.get(layout, torch.int32)] if part == "zeros" else [torch.int32, torch.int64]


def _refuse_misfit(name: str, file: Path, found: Tensor, size: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    if [n for n in found.shape if n != 1] != [n for n in size if n != 1]:
        raise ModelError(f"model: {file}: tensor {name} has shape {list(found.shape)}; {list(size)} is needed")
    if found.dtype not in dtypes:
        allowed = ", ".join(str(dtype)[6:] for dtype in dtypes)
        raise ModelError(f"model: tensor {name} in {file} is {str(found.dtype)[6:]}; needed is one of {allowed}")


def _turned(scheme: Scheme) -> bool:
    return scheme.layout in ("columns", "interleaved")


def _codes(scheme: Scheme, codes: Tensor) -> tuple[Tensor, Tensor | None]:
    """And the table of 4 bits."""
    match scheme.layout:
        case "float8" | "int8":
            return codes, None
        case "blocks":
            return codes.flatten(2).flatten(0, 1), _E2M1
        case "interleaved":
            values = _ordered(codes).T
            return values[:, ::2] | values[:, 1::2] << 4, _COUNTED
    packed = (codes.T if _turned(scheme) else codes).contiguous().view(torch.uint8)
    return (packed, _COUNTED) if scheme.bits == 4 else ((packed ^ 128).view(torch.int8), None)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[rows, words] -> [rows, codes]"""
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _ordered(words: Tensor) -> Tensor:
    return _unpacked(words, 4).view(len(words), -1, 8)[..., _INTERLEAVED].flatten(1)
