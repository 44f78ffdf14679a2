import triton
import triton.language as tl

#: Triton's interpreter multiplies no bfloat16; in float32 the products are the same.
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
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def product_onto(a, b, total):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
