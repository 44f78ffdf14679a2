"""The best columns by score + noise, without sorting: the best of each block, then of all blocks; then the next."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["columns", "blocks", "turn", "turns"], do_not_specialize_on_alignment=["seeds", "positions"]
)
def best_of_block(
    scores,  # float64 [rows, columns]
    seeds,  # int64 [rows], of the bits of unsigned ones
    positions,  # int64 [rows]
    ids,  # int64 [columns], ascending: their tokens; None: the columns themselves
    values,  # float64 [rows, turns]: the best of the turns before
    chosen,  # int64 [rows, turns]
    tops,  # float64 [rows, blocks]
    places,  # int64 [rows, blocks]
    columns,
    blocks,
    turn,
    turns,
    block: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = number * block + tl.arange(0, block)
    real = column < columns
    token = column if ids is None else tl.load(ids + column, mask=real, other=0)
    zero, position = tl.zeros([block], tl.uint32), tl.load(positions + row)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32) + zero, (position >> 32).to(tl.uint32) + zero
    a, b, c, d = tl.philox(tl.load(seeds + row), low, high, (token >> 2).to(tl.uint32), zero)
    word = tl.where(token & 1 == 0, tl.where(token & 2 == 0, a, c), tl.where(token & 2 == 0, b, d))
    noise = -tl.log(-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10))  # 2 ** -32
    total = tl.load(scores + row * columns + column, mask=real, other=float("-inf")) + noise
    if turn > 0:
        before, at = tl.load(values + row * turns + turn - 1), tl.load(chosen + row * turns + turn - 1)
        total = tl.where((total < before) | ((total == before) & (column > at)), total, float("-inf"))
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
