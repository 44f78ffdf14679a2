"""Products of codes in groups against their dequantized weights."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from sizes import sized
from torch import Tensor

from pilotfish.model.cpu.native_modules import PackedGatedMLP, PackedLinear, PackedWeight
from pilotfish.model.experts import Affine
from pilotfish.model.grouped import GroupedLinear, GroupedWeight, joined

DTYPES = (torch.float32, torch.bfloat16)
FOUR_BITS = torch.arange(16).float()
#: Of MXFP4 (OCP Microscaling Formats, table 5).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
KINDS = ("counted", "centred", "table", "int8", "float8")


def grouped(
    kind: str, outputs: int, inputs: int, group: int, dtype: torch.dtype, offsets: bool = True, halves: bool = True
) -> GroupedWeight:
    """With factors of float16 or float32."""
    factor = torch.float16 if halves else torch.float32
    scales = (torch.rand(outputs, inputs // group) / 64).to(factor)
    factors = (scales, dtype, (torch.randn(scales.shape) / 64).to(factor) if offsets else None)
    if kind == "int8":
        return GroupedWeight(torch.randint(-128, 128, (outputs, inputs)).to(torch.int8), *factors)
    if kind == "float8":
        return GroupedWeight((torch.randn(outputs, inputs) * 32).to(torch.float8_e4m3fn), *factors)
    table = {"counted": FOUR_BITS, "centred": FOUR_BITS - 8, "table": E2M1}[kind]
    return GroupedWeight(torch.randint(0, 256, (outputs, inputs // 2)).to(torch.uint8), *factors, table)


def exact(weight: GroupedWeight) -> Tensor:
    return replace(weight, dtype=torch.float64).dequantized()


def test_values_are_codes_times_scales_plus_offsets() -> None:
    codes = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F]], dtype=torch.uint8)
    weight = GroupedWeight(codes, torch.tensor([[2.0, 0.5]]), torch.float32, torch.tensor([[1.0, -1.0]]), FOUR_BITS - 8)
    first, second = torch.arange(1, 9).float() - 8, torch.tensor([9, 10, 11, 12, 13, 14, 15, 0]) - 8
    assert weight.shape == (1, 16) and weight.group == 8 and weight.nbytes == 8 + 8 + 8
    assert torch.equal(weight.dequantized()[0], torch.cat((2 * first + 1, second / 2 - 1)))


@pytest.mark.parametrize("kind", ["counted", "centred", "int8"])
def test_what_is_joined_keeps_its_values(kind: str) -> None:
    """In codes of 8 bits and the smaller groups, where they differ."""
    torch.manual_seed(1)
    same = [grouped("centred", 5, 64, 32, torch.float32) for _ in range(2)]
    for parts in (same, [grouped(kind, 7, 64, 16, torch.float32, offsets=False), *same]):
        both = joined(parts)
        assert torch.equal(both.dequantized(), torch.cat([one.dequantized() for one in parts]))
        assert both.group == min(one.group for one in parts)
        assert torch.equal(both[2:7].dequantized(), both.dequantized()[2:7])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", sized([(33, 96, 32), (40, 1152, 16)], [(1, 8, 8), (33, 96, 32), (40, 1152, 128)]))
def test_a_product_is_the_dequantized_weights(kind: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """In sums of float32, rounded once; and a row's bits do not depend on its company."""
    torch.manual_seed(2)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    for offsets, halves in product((True, False), repeat=2):
        weight = grouped(kind, *shape, dtype, offsets, halves)
        packed, x = PackedLinear(Affine(weight, None)), torch.randn(40, shape[1]).to(dtype)
        y, expected = packed(x), x.double() @ exact(weight).T
        size = x.double().abs() @ exact(weight).abs().T
        assert ((y.double() - expected).abs() <= tolerance * size).all()
        for rows in (1, 2, 5, 12, 13, 25):
            assert torch.equal(packed(x[:rows]), y[:rows]), f"{rows} rows"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_exact(kind: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)[:, None].expand(-1, 8).contiguous()
    scales = torch.full((256, 1), 0.5)
    if kind == "int8":
        weight = GroupedWeight(codes.view(torch.int8), scales, dtype)
    elif kind == "float8":
        codes[[0x7F, 0xFF]] = 0  # NaN, which is refused at load
        weight = GroupedWeight(codes.view(torch.float8_e4m3fn), scales, dtype)
    else:
        weight = replace(grouped(kind, 1, 16, 16, dtype), codes=codes, scales=scales, offsets=None)
    inputs = weight.shape[1]
    packed = PackedLinear(Affine(weight, None))
    for place in range(inputs):
        assert torch.equal(packed(torch.eye(inputs)[place : place + 1].to(dtype))[0], exact(weight)[:, place].to(dtype))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_feed_forward_takes_codes(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    gate, up = (grouped("counted", 96, 64, 32, dtype) for _ in range(2))
    down, x = grouped("int8", 64, 96, 32, dtype), torch.randn(30, 64).to(dtype)
    packed = PackedGatedMLP(*(Affine(weight, None) for weight in (gate, up, down)))
    between = (torch.nn.functional.silu(x.double() @ exact(gate).T) * (x.double() @ exact(up).T)).to(dtype)
    together, tolerance = packed(x), 1e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(together.double(), between.double() @ exact(down).T, rtol=tolerance, atol=tolerance)
    assert torch.equal(packed(x[:7]), together[:7])


@pytest.mark.usefixtures("kernels")
def test_kernels_refuse_what_does_not_fit() -> None:
    weight = PackedWeight.of(grouped("counted", 32, 64, 32, torch.float32))
    bad: list[dict[str, Any]] = [
        {"table": None},
        {"table": FOUR_BITS[:15]},
        {"offsets": weight.scales.float()},
        {"scales": weight.scales[:, :1]},
        {"inputs": 72},
        {"panels": weight.panels[:, :7]},
        {"panels": weight.panels.float()},
    ]
    for fields in bad:
        with pytest.raises(RuntimeError, match="weight:"):
            replace(weight, **fields).native  # noqa: B018


def test_the_reference_dequantizes() -> None:
    torch.manual_seed(4)
    weight, x = grouped("table", 6, 32, 16, torch.bfloat16), torch.randn(3, 32).bfloat16()
    linear = GroupedLinear(weight, torch.ones(6).bfloat16())
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.dequantized(), linear.bias))
