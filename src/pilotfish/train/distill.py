"""The draft: taught the target's whole distribution, on the corpus and on the target's own text.

A draft is asked to continue what the target wrote, so a share of each batch is text sampled from the
target; the rest is corpus text, which keeps the contexts as varied as prompts are.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish.train.batches import Batch, Windows
from pilotfish.train.loop import Plan, Trainer
from pilotfish.train.models import for_training, logits


def distill(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    sources: tuple[Windows, Windows],
    plan: Plan,
    directory: Path,
    progress: Progress,
) -> None:
    """Train the draft in place on windows of both sources (corpus, sampled), resuming from `directory`."""
    device = draft.device
    for_training(draft, device)
    for_training(target, device).eval()

    def batch_at(step: int) -> Batch:
        return _joined(*(windows.batch(step, device) for windows in sources))

    def loss_of(batch: Batch) -> Tensor:
        with torch.no_grad():
            taught = logits(target, batch.inputs, batch.positions)
        return divergence(taught, logits(draft, batch.inputs, batch.positions))

    Trainer(draft, plan, directory).run(batch_at, loss_of, progress, "draft")


def divergence(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Mean KL(target ‖ draft) in nats a token, of logits [..., vocabulary]."""
    target_log_probs = F.log_softmax(target_logits, -1).flatten(0, -2)
    draft_log_probs = F.log_softmax(draft_logits, -1).flatten(0, -2)
    return F.kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True)


def _joined(first: Batch, second: Batch) -> Batch:
    return Batch(torch.cat([first.tokens, second.tokens]), torch.cat([first.positions, second.positions]))
