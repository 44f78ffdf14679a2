import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_stride"])
def rotate_heads(
    x,  # [rows, heads, head_dim], in place; rows are `row_stride` apart
    cos,  # [rows, 2 * half / per_angle]
    sin,
    row_stride,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,  # of what is rotated of a head
    per_angle: tl.constexpr,  # 2: both halves have the same angles
    block: tl.constexpr,
):
    """Rounds once."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    real, angle = i < heads * half, i % half
    low = x + row * row_stride + i // half * head_dim + angle
    a, b = tl.load(low, mask=real, other=0.0).to(tl.float32), tl.load(low + half, mask=real, other=0.0).to(tl.float32)
    first = row * (2 * half // per_angle) + angle
    second = first + (half if per_angle == 1 else 0)
    cos_a, sin_a = tl.load(cos + first, mask=real, other=0.0), tl.load(sin + first, mask=real, other=0.0)
    cos_b, sin_b = tl.load(cos + second, mask=real, other=0.0), tl.load(sin + second, mask=real, other=0.0)
    rotated_a = a * cos_a.to(tl.float32) - b * sin_a.to(tl.float32)
    rotated_b = b * cos_b.to(tl.float32) + a * sin_b.to(tl.float32)
    tl.store(low, rotated_a.to(x.dtype.element_ty), mask=real)
    tl.store(low + half, rotated_b.to(x.dtype.element_ty), mask=real)
