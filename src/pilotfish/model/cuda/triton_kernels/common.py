import triton
import triton.language as tl

#: Triton's interpreter multiplies no bfloat16, and its sums in float32 depend on a column's place, unlike a matrix
#: unit's: it multiplies in float64, and rounds.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
#: Inputs after which Hopper's sums of 8-bit products, of few bits, are added to a sum of float32. Every block of inputs
#: is a multiple of it, so that it is at the same inputs for all tiles.
FP8_DEPTH = tl.constexpr(64)


@triton.jit
def as_computed(x, like):
    """Widens 8 bits."""
    if x.dtype != like.dtype:
        x = x.to(tl.float32).to(like.dtype)  # the interpreter turns no integer into bfloat16
    return x


@triton.jit
def product(a, b):
    if INTERPRETED:
        a, b = a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64)
        result = tl.dot(a, b, out_dtype=tl.float64).to(tl.float32)
    else:
        result = tl.dot(a, b, input_precision="ieee")
    return result


@triton.jit
def product_onto(a, b, total):
    if INTERPRETED:
        total += product(a, b)
    elif a.dtype.is_fp8():
        total = tl.dot(a, b, total, max_num_imprecise_acc=FP8_DEPTH)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def joined(parts, scales, row_scales, bias, place, n, row, size, splits: tl.constexpr, real):
    """A product's outputs `n` of `row`, at `place` of each of its `splits` parts of `size` sums, in float32; 0: it was
    joined before."""
    if splits == 0:
        total = tl.load(parts + place, mask=real, other=0.0).to(tl.float32)
    else:
        total = tl.zeros_like(place).to(tl.float32)
        for split in tl.static_range(splits):
            total += tl.load(parts + split * size.to(tl.int64) + place, mask=real, other=0.0)
        total = scaled(total, scales, row_scales, bias, n, row, real)
    return total


@triton.jit
def scaled(total, scales, row_scales, bias, n, row, real):
    """The product and the sum are fused where both are, by name: else each kernel's compiler would choose."""
    added = tl.zeros_like(total)
    if bias is not None:
        added += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    if scales is not None:
        scale = tl.load(scales + n, mask=real, other=0.0) + tl.zeros_like(total)
        if row_scales is not None:
            scale *= tl.load(row_scales + row + tl.zeros_like(n), mask=real, other=0.0)
        total = tl.fma(total, scale, added) if bias is not None else total * scale
    elif bias is not None:
        total += added
    return total
