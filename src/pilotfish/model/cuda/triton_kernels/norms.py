import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,  # [rows, parts * size]
    residual,  # like x, or None: x is added to it, and the sum is normed
    weight,  # [parts * size]
    out,  # like x
    eps,
    parts: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
):
    """A program norms a part of a row. It rounds to the weight's type before the weight is multiplied."""
    part, i = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    place, real = part * size + i, i < size
    wide = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + place, mask=real, other=0.0).to(tl.float32)
        wide = wide.to(x.dtype.element_ty).to(tl.float32)
        tl.store(residual + place, wide.to(x.dtype.element_ty), mask=real)
    weights = tl.load(weight + part % parts * size + i, mask=real, other=0.0)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)).to(weights.dtype)
    scaled = normed.to(tl.float32) * weights.to(tl.float32)
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=real)
