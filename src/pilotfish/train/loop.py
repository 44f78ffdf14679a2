"""The training loop that both models share: schedule, optimizers, checkpoints, a log, a progress bar."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish.model.processor import multiplies_bfloat16
from pilotfish.train.batches import Batch
from pilotfish.train.muon import Muon

WARMUP_STEPS = 50
DECAY_SHARE = 0.4  # of the steps, at the end: linear to zero
LOG_EVERY = 10  # steps
COMPILED_FROM = 1_000_000  # tokens

LossOf = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train: optimizer steps, tokens a step, the peak learning rate."""

    steps: int
    tokens_per_step: int
    learning_rate: float
    checkpoint_every: int

    def rate(self, step: int) -> float:
        """Learning rate of a step (from 0): warm up, hold, decay to zero."""
        warm = (step + 1) / WARMUP_STEPS
        decay = (self.steps - step) / max(1, round(self.steps * DECAY_SHARE))
        return self.learning_rate * min(1.0, warm, decay)

    def compiled(self, loss: LossOf) -> LossOf:
        """The loss compiled where the run is long enough to earn the half minute that this takes."""
        if self.steps * self.tokens_per_step < COMPILED_FROM:
            return loss
        torch._dynamo.config.suppress_errors = True  # without a C++ compiler it runs as it is
        return torch.compile(loss)


class Trainer:
    """One model in training; its state lives in `directory/checkpoint.pt` between runs."""

    def __init__(self, model: LlamaForCausalLM, plan: Plan, directory: Path) -> None:
        self.model, self.plan, self.directory = model, plan, directory
        self.optimizers = _optimizers(model, plan.learning_rate)
        self.step = 0

    def run(self, batch_at: Callable[[int], Batch], loss_of: LossOf, progress: Progress, title: str) -> None:
        """Train from the last checkpoint to the end of the plan; the batch is a function of the step."""
        self._restore()
        loss_of = self.plan.compiled(loss_of)
        bar = progress.add_task(title, total=self.plan.steps, completed=self.step)
        since, clock = self.step, time.monotonic()
        while self.step < self.plan.steps:
            loss = self._advance(loss_of, batch_at(self.step))
            progress.update(bar, completed=self.step, description=f"{title} · loss {loss:.3f}")
            if self.step % LOG_EVERY == 0:
                speed = (self.step - since) * self.plan.tokens_per_step / (time.monotonic() - clock)
                self._log({"step": self.step, "loss": loss, "tokens_per_second": round(speed)})
                since, clock = self.step, time.monotonic()
            if self.step % self.plan.checkpoint_every == 0 or self.step == self.plan.steps:
                self._save()

    def _advance(self, loss_of: LossOf, batch: Batch) -> float:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.plan.rate(self.step)
        with precision(self.model.device):
            loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    @property
    def _path(self) -> Path:
        return self.directory / "checkpoint.pt"

    def _save(self) -> None:
        """Write the checkpoint whole or not at all."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)

    def _restore(self) -> None:
        if not self._path.exists():
            return
        state = torch.load(self._path, weights_only=True, map_location=self.model.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def _log(self, record: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")


def precision(device: torch.device) -> torch.autocast:
    """Bfloat16 where the device multiplies it natively, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device))


def _optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        Muon(matrices, rate, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    ]
