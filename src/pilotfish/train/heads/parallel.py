import torch.nn.functional as F
from torch import Tensor, nn

from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.train.heads.trainee import Chains, Lesson, Shared, Trainee


class DepthHead(nn.Module):
    def __init__(self, head: MedusaHead, output: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(head.hidden, head.hidden, bias=head.bias) for _ in range(head.blocks))
        self.lm_head = nn.Linear(head.hidden, len(output), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        logits: Tensor = self.lm_head(x)
        return logits


class ParallelTrainee(Trainee):
    """Places of a lesson are 1, 2, …: what is guessed below a token comes of the feature before it."""

    def __init__(self, head: MedusaHead, shared: Shared) -> None:
        super().__init__(head.projection, shared)
        self.heads = nn.ModuleList(DepthHead(head, shared.output) for _ in range(head.heads))

    def forward(self, lesson: Lesson) -> Chains:
        feature = self.features(lesson.states[:, : lesson.places.shape[1]])
        return Chains([head(feature) for head in self.heads], [])
