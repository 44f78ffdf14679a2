"""The training loop of both models: learning rates, optimizers, checkpoints, a log, a progress bar."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish.model.native import multiplies_bfloat16
from pilotfish.train.data import TokenBatch
from pilotfish.train.recipe import PairRecipe

WARMUP_STEPS = 50
DECAY_SHARE = 0.4  # of the steps, at the end: linear to zero
LOG_EVERY = 10  # steps
COMPILED_FROM = 1_000_000  # tokens

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic whose iterates carry singular values towards 1
ITERATIONS = 5

#: Of tokens and positions, as a TokenBatch has them.
LossFunction = Callable[[Tensor, Tensor], Tensor]


class Trainer:
    """Trains a model in place on `tokens` tokens; its state is kept in `directory/checkpoint.pt` between runs."""

    def __init__(
        self, model: LlamaForCausalLM, recipe: PairRecipe, tokens: int, learning_rate: float, directory: Path
    ) -> None:
        """`learning_rate` is the peak."""
        self.model, self.recipe, self.directory = model, recipe, directory
        self.steps, self.learning_rate = tokens // recipe.tokens_per_step, learning_rate
        self.optimizers = _optimizers(model, learning_rate)
        self.step = 0
        self._checkpoint = directory / "checkpoint.pt"

    def run(self, batch_at: Callable[[int], TokenBatch], loss_of: LossFunction, progress: Progress) -> None:
        """Train from the last checkpoint to the end of the schedule; the batch is a function of the step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._checkpoint.exists():
            self._restore()
        loss_of = self._compiled(loss_of)
        title = self.directory.name
        bar = progress.add_task(title, total=self.steps, completed=self.step)
        since, clock = self.step, time.monotonic()
        while self.step < self.steps:
            loss = self._advance(loss_of, batch_at(self.step))
            progress.update(bar, completed=self.step, description=f"{title} · loss {loss:.3f}")
            if self.step % LOG_EVERY == 0:
                speed = (self.step - since) * self.recipe.tokens_per_step / (time.monotonic() - clock)
                with (self.directory / "log.jsonl").open("a") as log:
                    log.write(json.dumps({"step": self.step, "loss": loss, "tokens_per_second": round(speed)}) + "\n")
                since, clock = self.step, time.monotonic()
            if self.step % self.recipe.checkpoint_every == 0 or self.step == self.steps:
                self._save()

    def _compiled(self, loss_of: LossFunction) -> LossFunction:
        """The loss, compiled if the run is long enough to earn the half minute that this takes."""
        if self.steps * self.recipe.tokens_per_step < COMPILED_FROM:
            return loss_of
        torch._dynamo.config.suppress_errors = True  # without a C++ compiler it runs as it is
        return torch.compile(loss_of)

    def _advance(self, loss_of: LossFunction, batch: TokenBatch) -> float:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate()
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device)):
            loss = loss_of(batch.tokens.to(device), batch.positions.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def _rate(self) -> float:
        """Learning rate of the step: warm up, hold, decay to zero."""
        warm = (self.step + 1) / WARMUP_STEPS
        decay = (self.steps - self.step) / max(1, round(self.steps * DECAY_SHARE))
        return self.learning_rate * min(1.0, warm, decay)

    def _save(self) -> None:
        """Write the checkpoint whole or not at all."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _restore(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True, map_location=self.model.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


def _optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        Muon(matrices, rate, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    ]


class Muon(torch.optim.Muon):
    """Nesterov momentum, orthogonalised; steps have the size that AdamW's steps typically have.

    torch's own iterates in bfloat16, which CPUs without bfloat16 units run several times slower than float32; the
    algorithm and the scaling of its update ("match_rms_adamw") are the same here.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
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
