import copy
import json
import logging
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pilotfish.config.cache import made_once
from pilotfish.errors import ParameterError
from pilotfish.model.loading.precision import multiplies_bfloat16
from pilotfish.progress import PhaseProgress, PlannedPhase
from pilotfish.train.recipes import Recipe
from pilotfish.train.text.data import Tokens

logger = logging.getLogger(__name__)

WARMUP_STEPS = 50
DECAY_SHARE = 0.4  # of the steps, at the end: linear to zero
LOG_EVERY = 10  # steps
COMPILED_FROM = 1_000_000  # tokens
WARM_AFTER = 5.0  # seconds: a first step that takes longer tells enough

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic whose iterates carry singular values towards 1
ITERATIONS = 5


@dataclass(frozen=True)
class Schedule:
    tokens: int  # in all
    tokens_per_step: int
    learning_rate: float  # the peak
    checkpoint_every: int  # steps

    @classmethod
    def of(cls, recipe: Recipe, tokens: int, learning_rate: float) -> "Schedule":
        return cls(tokens, recipe.tokens_per_step, learning_rate, recipe.checkpoint_every)

    @property
    def steps(self) -> int:
        return self.tokens // self.tokens_per_step

    def rate(self, step: int) -> float:
        warm = (step + 1) / WARMUP_STEPS
        decay = (self.steps - step) / max(1, round(self.steps * DECAY_SHARE))
        return self.learning_rate * min(1.0, warm, decay)


class Learnt(NamedTuple):
    loss: Tensor
    acceptance: Tensor | None = None  # of a head, by depth [depths]


#: Of a batch's tensors.
LossFunction = Callable[..., Learnt]


class Trainer:
    def __init__(
        self, model: nn.Module, matrices: list[nn.Parameter], schedule: Schedule, directory: Path, loss_of: LossFunction
    ) -> None:
        """`matrices` are those that Muon trains."""
        self.model, self.matrices, self.schedule, self.directory = model, matrices, schedule, directory
        self.loss_of = loss_of
        self.device = next(model.parameters()).device
        self.optimizers = _optimizers(model, matrices, schedule.learning_rate)
        self.step = 0
        self._name = f"training {directory.name}"
        self.log = directory / "log.jsonl"
        self._checkpoint = directory / "checkpoint.pt"

    def plan(self, batch: Sequence[Tensor], progress: PhaseProgress) -> PlannedPhase:
        """Measures a step on `batch`, without effect on the model."""
        done = 0
        if self._has_checkpoint():
            done = torch.load(self._checkpoint, weights_only=True, map_location="cpu", mmap=True)["step"]
        if done == self.schedule.steps:
            return PlannedPhase(self._name, 0)
        with progress.phase(f"measuring a step of {self._name}"):
            return PlannedPhase(self._name, self.schedule.steps - done, self._measured(batch, progress.get_time))

    def _measured(self, batch: Sequence[Tensor], clock: Callable[[], float]) -> float:
        before = copy.deepcopy(self.model.train().state_dict())
        for _ in range(2):
            began = clock()
            self._advance(self.loss_of, batch)
            self.matrices[0].sum().item()  # waits for a device
            if (seconds := clock() - began) > WARM_AFTER:
                break
        self.model.load_state_dict(before)
        self.optimizers = _optimizers(self.model, self.matrices, self.schedule.learning_rate)
        self.step = 0
        return seconds

    def run(self, batch_at: Callable[[int], Sequence[Tensor]], progress: PhaseProgress) -> None:
        """From the last checkpoint to the end of the schedule; the batch is a function of the step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        if self._has_checkpoint():
            state = torch.load(self._checkpoint, weights_only=True, map_location=self.device)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step = state["step"]
        self.model.train()
        loss_of, steps = self._compiled(), self.schedule.steps
        with progress.phase(self._name, steps, "steps", self.step) as advance:
            advance(0, note="" if loss_of is self.loss_of else "compiling")
            while self.step < steps:
                learnt = self._advance(loss_of, batch_at(self.step))
                advance(note=f"loss {learnt.loss.item():.3f}")
                if self.step % LOG_EVERY == 0:
                    self._log(learnt)
                if self.step % self.schedule.checkpoint_every == 0 or self.step == steps:
                    self._save()

    def _log(self, learnt: Learnt) -> None:
        line: dict[str, Any] = {"step": self.step, "loss": learnt.loss.item()}
        if learnt.acceptance is not None:
            line["acceptance"] = [round(share, 4) for share in learnt.acceptance.tolist()]
        with self.log.open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _compiled(self) -> LossFunction:
        if self.schedule.tokens < COMPILED_FROM:
            return self.loss_of
        torch._dynamo.config.suppress_errors = True  # without a C++ compiler it runs as it is
        return torch.compile(self.loss_of)

    def _advance(self, loss_of: LossFunction, batch: Sequence[Tensor]) -> Learnt:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.schedule.rate(self.step)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=multiplies_bfloat16(self.device)):
            learnt = loss_of(*(tensor.to(self.device) for tensor in batch))
        learnt.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return learnt

    def _save(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"step": self.step, "model": self.model.state_dict(), "optimizers": optimizers}
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _has_checkpoint(self) -> bool:
        if not self._checkpoint.exists():
            return False
        if zipfile.is_zipfile(self._checkpoint):  # as torch writes them, and ends them last
            return True
        logger.warning("%s is damaged; training begins anew", self._checkpoint)
        self._checkpoint.replace(self._checkpoint.with_suffix(".damaged"))
        return False


def matrices_of(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2]


def _optimizers(model: nn.Module, matrices: list[nn.Parameter], rate: float) -> list[torch.optim.Optimizer]:
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        Muon(matrices, rate, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    ]


class Muon(torch.optim.Muon):
    """torch iterates in bfloat16 everywhere: several times slower than float32 on CPUs without it. Equal algorithm
    otherwise."""

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
    """About the nearest matrix with orthonormal rows (or columns); in bfloat16 where that is fast."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    if multiplies_bfloat16(matrix.device):
        wide = wide.bfloat16()
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).to(matrix.dtype)


# -- the folder of a run


def claim(run: Path, recipe: Recipe) -> None:
    """Another recipe's checkpoints would be resumed wrongly."""
    run.mkdir(parents=True, exist_ok=True)
    record = run / "recipe.json"
    if not record.exists():
        record.write_text(recipe.to_json())
    elif record.read_text() != recipe.to_json():
        raise ParameterError("run", str(run), "an empty directory, or one of the same recipe")


def cached(path: Path, make: Callable[[], Tokens]) -> Tokens:
    tokens: Tokens = np.load(made_once(path, lambda made: np.save(made, make())), mmap_mode="r")
    return tokens


def training_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ParameterError("device", name, "auto, cpu, or a CUDA device of this machine") from error
