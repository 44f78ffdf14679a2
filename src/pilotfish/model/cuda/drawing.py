from typing import Any

import torch
import triton
from torch import Tensor

from pilotfish.core.trees.tree import NO_TOKEN
from pilotfish.model.cuda.triton_kernels import drawing
from pilotfish.model.cuda.triton_kernels.drawing import best_of_all, best_of_block, narrow_border, tops_of_blocks
from pilotfish.model.cuda.triton_kernels.rules import add_to_tokens, lower_fresh, lower_seen, mask_rows
from pilotfish.model.draws import Draws
from pilotfish.model.rules import PENALTIES, SIZES, Rules
from pilotfish.model.sampling import NOISE_SCALE, SampleColumns

BLOCK = 2048  # columns of a program
EDITS = SIZES[0]  # of a program


def noisy_best(logits: Tensor, columns: SampleColumns, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `sampling.perturbed`, without sorting; of scores of -inf any columns, and for greedy samples without noise."""
    (rows, width), filters, blocks = logits.shape, columns.filters, triton.cdiv(logits.shape[1], BLOCK)
    values, chosen = columns.temperatures.new_empty(rows, k), columns.seeds.new_empty(rows, k)
    if not rows:
        return values, chosen
    grid, padded = (rows, blocks), triton.next_power_of_2(blocks)
    sizes = {"columns": width, "blocks": blocks, "rows": rows, "padded": padded, "block": BLOCK, "num_warps": 8}
    sizes["bits"] = 64 if logits.dtype == torch.float64 else 32
    given = logits.contiguous(), columns.temperatures, columns.floors
    tops = least = weights = borders = None
    if filters.min_p or filters.top_p:
        tops = values.new_empty(grid)
        tops_of_blocks[grid](given[0], tops, width, blocks, BLOCK, num_warps=8)
    if filters.top_k:
        least = _narrowed(*given, columns.top_k, tops, None, sizes, by_mass=False)[1][-1]
    if filters.top_p:
        weights, borders = _narrowed(*given, columns.top_p, tops, least, sizes, by_mass=True)
    best, places = values.new_empty(grid), chosen.new_empty(grid)
    for turn in range(k):
        best_of_block[grid](
            *given, columns.top_p, columns.seeds, columns.positions, columns.greedy, ids, tops, least, weights, borders,
            values, chosen, best, places, turn=turn, turns=k, **sizes,
        )  # fmt: skip
        best_of_all[(rows,)](best, places, values, chosen, blocks, turn, k, padded, num_warps=1)
    return values, chosen


def drawn_at_once(logits: Tensor, draws: Draws, ids: Tensor | None = None) -> Tensor:
    """As `Kernels.draw`, which a graph can record."""
    columns, k = SampleColumns.over(draws.table, draws.filters), min(max(draws.children, 1), logits.shape[1])
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    if draws.rows is not None:
        finite = finite.all().expand(draws.samples, 1)
    scores = edited(logits, draws)
    values, best = noisy_best(scores, columns, k, ids)
    likely = values - scores.float().logsumexp(dim=-1, keepdim=True) if draws.children else values
    chances = torch.where(columns.greedy[:, None] != 0, likely, (values / NOISE_SCALE).log_softmax(dim=-1))
    if ids is not None:
        best = ids[best]
    if not draws.children:
        best = torch.where(values > -torch.inf, best, NO_TOKEN)
    return torch.cat((best, chances.view(torch.int64), finite.long()), dim=1)


def edited(logits: Tensor, draws: Draws) -> Tensor:
    """[samples, vocab], as `Rules.applied` makes it; float64 where scores change."""
    (_, vocab), samples, rules = logits.shape, draws.samples, draws.rules or Rules()
    if draws.rows is None and not rules.tensors():
        return logits
    scores = logits.new_empty(samples, vocab, dtype=torch.float64 if rules.edits else logits.dtype)
    words = 0 if rules.bits is None else rules.bits.shape[1]
    mask_rows[samples, triton.cdiv(vocab, BLOCK)](
        logits, scores, draws.rows, rules.bits, logits.stride(0), vocab, words, BLOCK, num_warps=8
    )
    if rules.added is not None:
        count = rules.added.shape[1]
        add_to_tokens[(count // EDITS,)](scores, rules.added, count, EDITS, num_warps=1)
    penalties, exact = draws.table[PENALTIES:], {"num_warps": 1, "enable_fp_fusion": False}  # as the reference rounds
    if rules.seen is not None and rules.spans is not None and rules.paths is not None:
        count, depth, block = rules.seen.shape[1], rules.paths.shape[1], min(rules.longest, 256)
        lower_seen[samples, rules.longest // block](
            scores, rules.seen, rules.spans, rules.paths, penalties, count, vocab, samples, depth, block, **exact
        )
    if rules.fresh is not None:
        count = rules.fresh.shape[1]
        lower_fresh[(count // EDITS,)](scores, rules.fresh, penalties, count, vocab, samples, EDITS, **exact)
    return scores


def _narrowed(
    logits: Tensor,
    temperatures: Tensor,
    floors: Tensor,
    wanted: Tensor,
    tops: Tensor | None,
    least: Tensor | None,
    sizes: dict[str, Any],
    *,
    by_mass: bool,
) -> tuple[Tensor, Tensor]:
    """`weights` and `borders` of the kernel."""
    turns, grid = sizes["bits"] // 3 + 1, (len(logits), sizes["blocks"])
    weights = temperatures.new_empty(turns + 1, *grid, drawing.CANDIDATES.value)
    borders = torch.empty(turns + 1, len(logits), dtype=torch.int64, device=logits.device)
    for turn in range(turns + 1):
        narrow_border[grid](
            logits, temperatures, floors, wanted, tops, least, weights, borders, turn=turn, by_mass=by_mass, **sizes
        )
    return weights, borders
