"""The Triton products, norms and rotations against the reference, on the device or in Triton's interpreter, and the
order in which they add. The interpreter has no bits of a matrix unit: tests/gpu compares those."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from sizes import paired, sized

pytest.importorskip("triton")

from pilotfish.model.cuda import products
from pilotfish.model.cuda.kernels import CUDAKernels
from pilotfish.model.cuda.products import BLOCK_K, FEW, InvariantLinear, OrderedWeight, SplitProduct, quantized
from pilotfish.model.experts import Affine
from pilotfish.model.kernels import JoinedLinear, Kernels, RMSNorm
from pilotfish.model.kv_planes import FP8_CAPABILITY
from pilotfish.model.loading.quantize import rounded

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS, REFERENCE = CUDAKernels(DEVICE), Kernels(DEVICE)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_FP8 = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= FP8_CAPABILITY  # the interpreter has it
#: Outputs and inputs: of whole blocks, and of parts of some; with the last, rows of odd bytes, which come without the
#: copy engine.
SHAPES = [(64, 256), (100, 520), (24, 40), (70, 33)]
ROWS = (1, 40, FEW + 1, 150)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance * 8)


@pytest.mark.parametrize(("shape", "case"), paired(SHAPES, [*((r, d) for r in ROWS for d in DTYPES)]), ids=str)
def test_it_is_the_product(shape: tuple[int, int], case: tuple[int, torch.dtype]) -> None:
    rows, dtype = case
    affine = Affine(normal(*shape, dtype=dtype, seed=1) / 8, normal(shape[0], dtype=dtype, seed=2))
    x = normal(rows, shape[1], dtype=dtype)
    check(KERNELS.linear(affine)(x), REFERENCE.linear(affine)(x))


@pytest.mark.parametrize("rows", sized((1, FEW + 1), ROWS))
@pytest.mark.parametrize("stored", [torch.int8, *([torch.float8_e4m3fn] if HAS_FP8 else ())], ids=str)
def test_weights_of_8_bits(stored: torch.dtype, rows: int) -> None:
    """Beside e4m3 rows have 8 bits too."""
    weight, bias = rounded(normal(48, 272), stored), normal(48, dtype=torch.bfloat16)
    x = normal(rows, 272, dtype=torch.bfloat16, seed=1)
    got = InvariantLinear(Affine(weight, bias), Affine(weight, bias))(x)  # type: ignore[arg-type]
    codes, scales = quantized(x)  # which the interpreter rounds wrong below powers of two
    given = x.float() if stored == torch.int8 else codes.float() * scales[:, None]
    expected = torch.nn.functional.linear(given, weight.dequantized(), bias.float())
    check(got, torch.cat((expected, expected), dim=1).bfloat16())


@pytest.mark.skipif(not HAS_FP8, reason="needs a device with 8-bit floats")
def test_a_row_of_8_bits_depends_on_itself_alone() -> None:
    x = normal(5, 40, dtype=torch.bfloat16) * torch.tensor([1e-3, 1, 50, 0, 3], device=DEVICE)[:, None].bfloat16()
    codes, scales = quantized(x)
    torch.testing.assert_close(codes.float() * scales[:, None], x.float(), rtol=2**-3, atol=1e-2 * float(scales.max()))
    for row in range(5):
        own, scale = quantized(x[row : row + 1])
        assert torch.equal(own.view(torch.uint8), codes[row : row + 1].view(torch.uint8)) and scale == scales[row]


def test_several_products_are_joined_and_any_shape_of_rows_is_kept() -> None:
    affines = [Affine(normal(size, 64, seed=size), normal(size)) for size in (24, 8)]
    x = normal(2, 3, 64)
    check(KERNELS.linear(*affines)(x), JoinedLinear(*affines)(x))
    assert KERNELS.linear(*affines)(x[:, :0]).shape == (2, 0, 32)


# -- the order of sums


def told_order(rows: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Outputs in float32 whose last bits tell in which order they were summed: of each block of inputs one counts, so
    that no order within a block matters, and summands differ by many powers of two."""
    inputs = 16 * BLOCK_K
    monkeypatch.setattr(products, "PROGRAMS", splits)
    weight, x = summands(inputs)
    linear = InvariantLinear(Affine(weight, None))
    assert linear.weight.splits == splits
    out = torch.empty(rows, len(weight), device=DEVICE)
    x = x.expand(rows, inputs).contiguous()
    if rows > FEW:
        products._many(out, x, linear.weight, None, None)
    else:
        products._joined(out, SplitProduct(products._few(x, linear.weight), splits))
    assert (out == out[0]).all()
    return out[0].cpu()


def summands(inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    weight = np.zeros((FEW, inputs), np.float32)
    size = FEW, inputs // BLOCK_K
    weight[:, ::BLOCK_K] = rng.normal(size=size) * 2.0 ** rng.integers(-12, 12, size)
    return torch.from_numpy(weight).to(DEVICE, torch.bfloat16), torch.ones(1, inputs, device=DEVICE).bfloat16()


@pytest.mark.parametrize("splits", [1, 4])
def test_sums_are_of_parts_in_order_whatever_the_rows(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = summands(16 * BLOCK_K)
    counted = weight.float().cpu().numpy()[:, ::BLOCK_K]
    parts = np.split(counted, splits, axis=1)
    add = functools.partial(functools.reduce, np.add)
    expected = add([add(list(part.T), np.zeros(FEW, np.float32)) for part in parts], np.zeros(FEW, np.float32))
    assert (add(list(counted.T[::-1])) != expected).any(), "another order gives other bits"
    # a matrix unit cuts bits off where numpy rounds: on a card rows are compared with each other
    one = torch.from_numpy(expected) if DEVICE.type == "cpu" else told_order(1, splits, monkeypatch)
    torch.testing.assert_close(one, torch.from_numpy(expected), rtol=1e-5, atol=1e-2)
    for rows in (1, 17, FEW, FEW + 1, 200):
        assert torch.equal(told_order(rows, splits, monkeypatch), one), f"{rows} rows"


@pytest.mark.parametrize(("shape", "splits"), [((6144, 4096), 4), ((4096, 14336), 4), ((28672, 4096), 1), ((8, 96), 1)])
def test_parts_follow_from_the_shape_alone(shape: tuple[int, int], splits: int) -> None:
    weight = OrderedWeight(torch.empty(shape, device="meta"), None)
    assert weight.splits == splits
    assert weight.span * splits >= shape[1] and weight.span % BLOCK_K == 0


# -- norms


def norms(size: int, parts: int, dtype: torch.dtype, wide: bool) -> list[RMSNorm]:
    weight = normal(size, dtype=torch.float32 if wide else dtype)
    return [kernels.rms_norm(weight, 1e-6, parts) for kernels in (KERNELS, REFERENCE)]


@pytest.mark.parametrize(("size", "parts"), [(64, 1), (100, 1), (96, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(size: int, parts: int, dtype: torch.dtype) -> None:
    for wide in (False, True):
        own, reference = norms(size, parts, dtype, wide)
        x = normal(5, size, dtype=dtype, seed=1)
        check(own(x), reference(x))
        residuals = [normal(5, size, dtype=dtype, seed=2) for _ in range(2)]
        check(own.of_sum(residuals[0], x), reference.of_sum(residuals[1], x))
        check(*residuals)  # the interpreter rounds bfloat16 otherwise


def test_norms_of_heads() -> None:
    own, reference = norms(32, 1, torch.float32, wide=False)
    x: Any = normal(3, 8, 32)[:, 2:6]
    check(own.of_heads(x), reference.of_heads(x))


# -- rotations


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rotated", "per_angle"), [(32, 1), (16, 1), (32, 2)])
def test_heads_are_rotated(rotated: int, per_angle: int, dtype: torch.dtype) -> None:
    """Where they lie among others, of which none changes."""
    joined = normal(5, 6, 32, dtype=dtype)
    angles = normal(5, rotated // per_angle, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = REFERENCE.rotate(joined[:, 1:4], cos, sin, per_angle)
    before = joined.clone()
    check(KERNELS.rotate(joined[:, 1:4], cos, sin, per_angle), expected)
    assert torch.equal(joined[:, [0, 4, 5]], before[:, [0, 4, 5]])
    assert torch.equal(joined[:, 1:4, rotated:], before[:, 1:4, rotated:])
