import triton
import triton.language as tl

from pilotfish.model.cuda.triton_kernels.common import joined


@triton.jit(do_not_specialize=["all_sums"])
def rms_norm(
    x,  # [rows, parts * size], or a product's parts
    scales,
    row_scales,
    bias,
    residual,  # [rows, parts * size], or None: x is added to it, and the sum is normed
    weight,  # [parts * size]
    out,  # [rows, parts * size]
    eps,
    all_sums,  # rows * parts * size
    parts: tl.constexpr,
    size: tl.constexpr,
    splits: tl.constexpr,  # of the product; 0: it is none
    block: tl.constexpr,
):
    """A program norms a part of a row. It rounds to the weight's type before the weight is multiplied."""
    part, i = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    place, n, real = part * size + i, part % parts * size + i, i < size
    kind = out.dtype.element_ty
    wide = joined(x, scales, row_scales, bias, place, n, part // parts, all_sums, splits, real).to(kind).to(tl.float32)
    if residual is not None:
        wide = (wide + tl.load(residual + place, mask=real, other=0.0).to(tl.float32)).to(kind)
        tl.store(residual + place, wide, mask=real)
        wide = wide.to(tl.float32)
    weights = tl.load(weight + n, mask=real, other=0.0)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)).to(weights.dtype)
    tl.store(out + place, (normed.to(tl.float32) * weights.to(tl.float32)).to(kind), mask=real)
