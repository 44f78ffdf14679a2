import triton
import triton.language as tl

#: Triton's interpreter multiplies no bfloat16, and its sums in float32 depend on a column's place, unlike a matrix
#: unit's: it multiplies in float64, and rounds.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def joined(parts, scales, bias, place, n, size, splits: tl.constexpr, real):
    """A product's outputs `n` at `place` of each of its `splits` parts of `size` sums, in float32; 0: it was joined
    before."""
    if splits == 0:
        return tl.load(parts + place, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros_like(place).to(tl.float32)
    for split in tl.static_range(splits):
        total += tl.load(parts + split * size.to(tl.int64) + place, mask=real, other=0.0)
    return scaled(total, scales, bias, n, real)


@triton.jit
def scaled(total, scales, bias, n, real):
    """The product and the sum are fused where both are, by name: else each kernel's compiler would choose."""
    added = tl.zeros_like(total)
    if bias is not None:
        added += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    if scales is not None:
        scale = tl.load(scales + n, mask=real, other=0.0) + tl.zeros_like(total)
        total = tl.fma(total, scale, added) if bias is not None else total * scale
    elif bias is not None:
        total += added
    return total
