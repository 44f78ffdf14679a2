import torch
import triton
from torch import Tensor

from pilotfish.model.cuda.triton_kernels.drawing import best_of_all, best_of_block

BLOCK = 2048  # columns of a program


def noisy_best(
    scores: Tensor, seeds: Tensor, positions: Tensor, k: int, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `sampling.perturbed_topk_reference`; of scores of -inf any columns."""
    (rows, columns), blocks = scores.shape, triton.cdiv(scores.shape[1], BLOCK)
    values, tops = scores.new_empty(rows, k), scores.new_empty(rows, blocks)
    chosen, places = (torch.empty_like(each, dtype=torch.int64) for each in (values, tops))
    for turn in range(k if rows else 0):
        best_of_block[rows, blocks](
            scores, seeds, positions, ids, values, chosen, tops, places, columns, blocks, turn, k, BLOCK, num_warps=8
        )
        best_of_all[(rows,)](tops, places, values, chosen, blocks, turn, k, triton.next_power_of_2(blocks), num_warps=1)
    return values, chosen
