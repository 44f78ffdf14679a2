"""Masks, bias and penalties on logits, for `drawing`. What excludes a token makes it -inf, which no other rule changes,
so that only a token's bias and penalties have an order."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stride", "columns", "words"], do_not_specialize_on_alignment=["rows", "bits"])
def mask_rows(
    logits,  # [kept rows, columns], rows `stride` apart
    scores,  # [samples, columns]
    rows,  # int64 [samples] or None: a sample of each row
    bits,  # int32 [samples, words], of the columns that stay; None: all
    stride,
    columns,
    words,
    block: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = sample if rows is None else tl.load(rows + sample)
    column = tl.program_id(1) * block + tl.arange(0, block)
    real = column < columns
    score = tl.load(logits + row * stride + column, mask=real, other=0.0).to(scores.dtype.element_ty)
    if bits is not None:
        word = tl.load(bits + sample * words + (column >> 5), mask=real, other=0)
        score = tl.where(((word >> (column & 31)) & 1) != 0, score, float("-inf"))
    tl.store(scores + sample * columns + column, score, mask=real)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["added"])
def add_to_tokens(
    scores,  # float64 [samples, columns]
    added,  # int64 [2, count]: places in `scores`, or -1; the bits of float64. Of one place at most one is finite
    count,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    place, number = tl.load(added + at), tl.load(added + count + at).to(tl.float64, bitcast=True)
    tl.atomic_add(scores + place, number, mask=place >= 0)


@triton.jit(
    do_not_specialize=["count", "columns", "samples", "depth"],
    do_not_specialize_on_alignment=["seen", "spans", "paths", "penalties"],
)
def lower_seen(
    scores,  # float64 [samples, columns]
    seen,  # int64, as all below: [2, count], tokens and how often each was given
    spans,  # [2, samples]: where a sample's tokens begin and end
    paths,  # [samples, depth]: tokens that were given once more, or -1
    penalties,  # [3, samples]: of repetition, presence and frequency, the bits of float64
    count,
    columns,
    samples,
    depth,
    block: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    first, end = tl.load(spans + sample) + tl.program_id(1) * block, tl.load(spans + samples + sample)
    if first >= end:
        return
    at = first + tl.arange(0, block)
    real = at < end
    token = tl.load(seen + at, mask=real, other=0)
    times = tl.load(seen + count + at, mask=real, other=0)
    for i in range(depth):
        times += (token == tl.load(paths + sample * depth + i)).to(tl.int64)
    _lower(scores, sample * columns + token, times, real & (token < columns), sample + token * 0, penalties, samples)


@triton.jit(do_not_specialize=["count", "columns", "samples"], do_not_specialize_on_alignment=["fresh", "penalties"])
def lower_fresh(
    scores,
    fresh,  # int64 [2, count]: places in `scores`, each once, or -1; how often their tokens were given
    penalties,
    count,
    columns,
    samples,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.load(fresh + at)
    real = place >= 0
    sample = tl.where(real, place // columns, 0)
    _lower(scores, place, tl.load(fresh + count + at), real, sample, penalties, samples)


@triton.jit
def _lower(scores, place, times, real, sample, penalties, samples):
    """As `Rules.applied`; nothing is fused."""
    repetition = tl.load(penalties + sample).to(tl.float64, bitcast=True)
    presence = tl.load(penalties + samples + sample).to(tl.float64, bitcast=True)
    frequency = tl.load(penalties + 2 * samples + sample).to(tl.float64, bitcast=True)
    score = tl.load(scores + place, mask=real, other=0.0)
    score = tl.where(score > 0, score / repetition, score * repetition)
    score -= times.to(tl.float64) * frequency + tl.where(times > 0, presence, 0.0)
    tl.store(scores + place, score, mask=real)
