"""The target: next-token prediction on the corpus."""

from pathlib import Path

import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish.train.batches import Batch, Windows
from pilotfish.train.loop import Plan, Trainer
from pilotfish.train.models import for_training, logits


def pretrain(target: LlamaForCausalLM, windows: Windows, plan: Plan, directory: Path, progress: Progress) -> None:
    """Train the target in place, resuming from `directory`."""
    device = target.device
    for_training(target, device)

    def batch_at(step: int) -> Batch:
        return windows.batch(step, device)

    def loss_of(batch: Batch) -> Tensor:
        predicted = logits(target, batch.inputs, batch.positions)
        return F.cross_entropy(predicted.flatten(0, 1), batch.targets.flatten())

    Trainer(target, plan, directory).run(batch_at, loss_of, progress, "target")
