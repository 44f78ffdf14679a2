"""The best columns by score + noise, without sorting: the best of each block, then of all blocks; then the next.

Filters keep the columns from a *border* on, found three bits at a time: in each turn every block weighs the columns
from each of eight candidates on, and the next turn goes on from the highest whose columns weigh enough in all blocks.

    top-k   a column weighs 1, and k are enough
    top-p   a column weighs exp(score - top), and top_p of what all weigh is enough
"""

import triton
import triton.language as tl

CANDIDATES = tl.constexpr(8)


@triton.jit(do_not_specialize=["columns", "blocks"])
def tops_of_blocks(logits, tops, columns, blocks, block: tl.constexpr):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logit, _ = _read(logits, row, columns, number * block + tl.arange(0, block))
    tl.store(tops + row * blocks + number, tl.max(logit, axis=0).to(tl.float64))


@triton.jit(
    do_not_specialize=["columns", "blocks", "rows", "turn"],
    do_not_specialize_on_alignment=["floors", "wanted", "least"],
)
def narrow_border(
    logits,  # [rows, columns]
    temperatures,  # float64 [rows], as floors
    floors,
    wanted,  # int64 [rows], top_k, or float64 [rows], top_p
    tops,  # float64 [rows, blocks]: the highest logit; None: no row has a floor, and `by_mass` is off
    least,  # int64 [rows]: the border of filters before; None: there is none
    weights,  # float64 [turns + 1, rows, blocks, CANDIDATES]; last the weight above the border, that of one column at
    #           it, and how many are there
    borders,  # int64 [turns + 1, rows]
    columns,
    blocks,
    rows,
    turn,
    bits: tl.constexpr,
    by_mass: tl.constexpr,
    padded: tl.constexpr,  # power of two that holds the blocks
    block: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    candidate = tl.arange(0, CANDIDATES)
    first: tl.constexpr = bits % 3  # of the first turn, as many as make the others whole
    turns: tl.constexpr = bits // 3 + 1
    lowest: tl.constexpr = -(1 << (bits - 1))
    border = row * 0 + lowest
    if turn > 0:
        before = tl.load(borders + (turn - 1).to(tl.int64) * rows + row)
        heavy = _over_blocks(weights, turn - 1, row, rows, blocks, padded) >= _enough(
            wanted, weights, row, rows, blocks, by_mass, padded
        )
        heavy = heavy & (candidate > 0) & ((turn > 1) | (candidate < (1 << first)))
        border = before + (tl.sum(heavy.to(tl.int64), axis=0) << (bits - first - 3 * (turn - 1)))
    tl.store(borders + turn.to(tl.int64) * rows + row, border, mask=number == 0)

    logit, real = _read(logits, row, columns, number * block + tl.arange(0, block))
    key, temperature = _key(logit), tl.load(temperatures + row)
    real = real & (logit > float("-inf"))
    weight = tl.zeros([block], tl.float64) + 1
    if tops is not None:
        top = _top(tops, row, blocks, padded) / temperature
        score = logit.to(tl.float64) / temperature
        real = real & (score >= top + tl.load(floors + row))
        if by_mass:
            weight = tl.exp(score - tl.where(top == float("-inf"), 0.0, top))
    if least is not None:
        real = real & (key >= tl.load(least + row))
    weight = tl.where(real, weight, 0.0)
    found = tl.zeros([CANDIDATES], tl.float64)
    if turn < turns:
        shift = bits - first - 3 * turn
        for each in tl.static_range(CANDIDATES):
            from_here = border + ((row * 0 + each) << shift)
            found = tl.where(candidate == each, tl.sum(tl.where(key >= from_here, weight, 0.0), axis=0), found)
    else:
        at = real & (key == border)
        found = tl.where(candidate == 0, tl.sum(tl.where(key > border, weight, 0.0), axis=0), found)
        found = tl.where(candidate == 1, tl.max(tl.where(at, weight, 0.0), axis=0), found)
        found = tl.where(candidate == 2, tl.sum(at.to(tl.float64), axis=0), found)
    to = ((turn.to(tl.int64) * rows + row) * blocks + number) * CANDIDATES
    tl.store(weights + to + candidate, found)


@triton.jit(
    do_not_specialize=["columns", "blocks", "rows", "turn", "turns"],
    do_not_specialize_on_alignment=["floors", "top_p", "seeds", "positions", "greedy", "least"],
)
def best_of_block(
    logits,  # [rows, columns]
    temperatures,  # float64 [rows], as floors and top_p
    floors,
    top_p,
    seeds,  # int64 [rows], of the bits of unsigned ones
    positions,  # int64 [rows]
    greedy,  # int64 [rows], 0: add noise
    ids,  # int64 [columns], ascending: their tokens; None: the columns themselves
    block_tops,  # float64 [rows, blocks] or None, as the four below: what filters found, where there are any
    least,  # int64 [rows], of top-k
    weights,  # of top-p
    borders,
    values,  # float64 [rows, turns]: the best of the turns before
    chosen,  # int64 [rows, turns]
    tops,  # float64 [rows, blocks]
    places,  # int64 [rows, blocks]
    columns,
    blocks,
    rows,
    turn,
    turns,
    bits: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = number * block + tl.arange(0, block)
    logit, real = _read(logits, row, columns, column)
    key, temperature = _key(logit), tl.load(temperatures + row)
    score = logit.to(tl.float64) / temperature
    if block_tops is not None:
        floor = _top(block_tops, row, blocks, padded) / temperature + tl.load(floors + row)
        real = real & (score >= floor)
    if least is not None:
        real = real & (key >= tl.load(least + row))
    if borders is not None:
        last: tl.constexpr = bits // 3 + 1
        border = tl.load(borders + last * rows.to(tl.int64) + row)
        at, sums = real & (key == border), _over_blocks(weights, last, row, rows, blocks, padded)
        which = tl.arange(0, CANDIDATES)
        above = tl.sum(tl.where(which == 0, sums, 0.0), axis=0)
        every = _of_blocks(weights, last, row, rows, blocks, padded)
        lower = (tl.arange(0, padded) < number)[:, None] & (which == 2)[None, :]
        equal = tl.sum(tl.sum(tl.where(lower, every, 0.0), axis=0), axis=0)
        one = tl.max(tl.max(tl.where((which == 1)[None, :], every, 0.0), axis=0), axis=0)
        ahead = equal + tl.cumsum(at.to(tl.float64), axis=0) - 1  # equals with a lower id
        fits = above + ahead * one < _enough(top_p, weights, row, rows, blocks, True, padded)
        real = real & ((key > border) | (at & fits))

    token = column if ids is None else tl.load(ids + column, mask=column < columns, other=0)
    if tl.load(greedy + row) == 0:
        zero, position = tl.zeros([block], tl.uint32), tl.load(positions + row)
        low, high = (position & 0xFFFFFFFF).to(tl.uint32) + zero, (position >> 32).to(tl.uint32) + zero
        a, b, c, d = tl.philox(tl.load(seeds + row), low, high, (token >> 2).to(tl.uint32), zero)
        word = tl.where(token & 1 == 0, tl.where(token & 2 == 0, a, c), tl.where(token & 2 == 0, b, d))
        score += -tl.log(-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10))  # 2 ** -32
    total = tl.where(real, score, float("-inf"))
    if turn > 0:
        before, earlier = tl.load(values + row * turns + turn - 1), tl.load(chosen + row * turns + turn - 1)
        total = tl.where((total < before) | ((total == before) & (column > earlier)), total, float("-inf"))
    top, place = tl.max(total, axis=0, return_indices=True)  # of equals the first
    tl.store(tops + row * blocks + number, top)
    tl.store(places + row * blocks + number, number * block + place)


@triton.jit(do_not_specialize=["blocks", "turn", "turns"])
def best_of_all(tops, places, values, chosen, blocks, turn, turns, padded: tl.constexpr):
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    top, place = tl.max(
        tl.load(tops + row * blocks + number, mask=number < blocks, other=float("-inf")), axis=0, return_indices=True
    )
    tl.store(values + row * turns + turn, top)
    tl.store(chosen + row * turns + turn, tl.load(places + row * blocks + place))


@triton.jit
def _read(logits, row, columns, column):
    """float32 or float64, without NaN or -0, which is no other number than 0; and which columns there are."""
    real = column < columns
    logit = tl.load(logits + row * columns + column, mask=real, other=float("-inf"))
    if logit.dtype != tl.float64:
        logit = logit.to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    return tl.where(logit == 0, 0.0, logit), real


@triton.jit
def _key(logit):
    """int64, in the order of the numbers."""
    if logit.dtype == tl.float64:
        number = logit.to(tl.int64, bitcast=True)
        key = tl.where(number < 0, number ^ 0x7FFFFFFFFFFFFFFF, number)
    else:
        number = logit.to(tl.int32, bitcast=True)
        key = tl.where(number < 0, number ^ 0x7FFFFFFF, number).to(tl.int64)
    return key


@triton.jit
def _top(tops, row, blocks, padded: tl.constexpr):
    number = tl.arange(0, padded)
    return tl.max(tl.load(tops + row * blocks + number, mask=number < blocks, other=float("-inf")), axis=0)


@triton.jit
def _of_blocks(weights, turn, row, rows, blocks, padded: tl.constexpr):
    """[padded, CANDIDATES]"""
    number, start = tl.arange(0, padded), (turn * rows.to(tl.int64) + row) * blocks * CANDIDATES
    place = number[:, None] * CANDIDATES + tl.arange(0, CANDIDATES)[None, :]
    return tl.load(weights + start + place, mask=(number < blocks)[:, None], other=0.0)


@triton.jit
def _over_blocks(weights, turn, row, rows, blocks, padded: tl.constexpr):
    """[CANDIDATES]"""
    return tl.sum(_of_blocks(weights, turn, row, rows, blocks, padded), axis=0)


@triton.jit
def _enough(wanted, weights, row, rows, blocks, by_mass: tl.constexpr, padded: tl.constexpr):
    """Infinite where the row has no such filter: then all columns are from the border on, the lowest."""
    one = tl.load(wanted + row)
    if by_mass:
        heaviest = tl.max(_over_blocks(weights, 0, row, rows, blocks, padded), axis=0)  # from the lowest on: of all
        found = tl.where(one < 1.0, one * heaviest, float("inf"))
    else:
        found = tl.where(one > 0, one.to(tl.float64), float("inf"))
    return found
