"""Muon in float32: momentum whose update is made orthogonal, for the 2-D matrices inside the layers.

`torch.optim.Muon` iterates in bfloat16, which CPUs without bfloat16 units run several times slower
than float32; the algorithm and the scaling of its update are the same here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic whose iterates carry singular values towards 1
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; steps have the size that AdamW's steps typically have."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, matrix: Tensor, gradient: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        average = state["momentum"].lerp_(gradient, 1 - momentum)
        update = orthogonalise(gradient.lerp(average, momentum))
        matrix.mul_(1 - lr * weight_decay)
        # An orthogonal matrix's entries have RMS 1 / sqrt(longer side); AdamW's steps have about 0.2.
        matrix.add_(update, alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows (or columns), approximately: singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
