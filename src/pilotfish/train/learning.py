from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.train.heads.trainee import Lesson, Trainee
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.trainer import Learnt

DIVERGENCE, VARIATION = 0.1, 0.9  # weights of KL(target ‖ head) and of the chance of a refusal
DECAY = 0.8  # of both, from depth to depth


@dataclass(frozen=True)
class Verdicts:
    """On guesses at one depth, where all before were right; [rows, starts] each."""

    overlap: Tensor  # the chance that a token sampled from them is accepted
    divergence: Tensor  # KL(target ‖ head) over what the head can say, in nats
    agrees: Tensor  # bool: whether both find the same token likeliest
    confidence: Tensor | None  # logits of what the head takes `overlap` for


@dataclass(frozen=True)
class Teacher:
    target: TaughtTarget
    layers: tuple[int, ...]  # whose hidden states the head gets
    draft_ids: Tensor | None  # int64 [draft vocabulary]: the target's tokens that the head can say; None: all

    def judge(
        self, trainee: Trainee, tokens: Tensor, positions: Tensor, places: Tensor, temperature: float = 1.0
    ) -> list[Verdicts]:
        """By depth, on text [rows, length] and places [rows, starts] in it; both models sampled at `temperature`."""
        with torch.no_grad():
            states, logits = self.target.forward(tokens, positions, self.layers)
            everything = (logits.float() / temperature).softmax(-1)
            likeliest = everything.argmax(-1)
            chances = everything if self.draft_ids is None else everything[..., self.draft_ids]
            entropy = -torch.xlogy(chances, chances).sum(-1)
        chains = trainee(Lesson(tokens, positions, places, states))
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        verdicts = []
        for depth, logits in enumerate(chains.logits):
            at = (rows, places + depth)
            learnt = (logits.float() / temperature).log_softmax(-1)
            overlap = torch.minimum(learnt.exp(), chances[at]).sum(-1)
            divergence = -(chances[at] * learnt).sum(-1) - entropy[at]
            guessed = learnt.argmax(-1) if self.draft_ids is None else self.draft_ids[learnt.argmax(-1)]
            confidence = chains.confidence[depth] if chains.confidence else None
            verdicts.append(Verdicts(overlap, divergence, guessed == likeliest[at], confidence))
        return verdicts


def learn(verdicts: Sequence[Verdicts]) -> Learnt:
    losses = []
    for depth, each in enumerate(verdicts):
        loss = (DIVERGENCE * each.divergence + VARIATION * (1 - each.overlap)).mean()
        if each.confidence is not None:
            loss = loss + F.binary_cross_entropy_with_logits(each.confidence, each.overlap.detach().clamp(0, 1))
        losses.append(DECAY**depth * loss)
    total = sum(DECAY**depth for depth in range(len(verdicts)))
    return Learnt(torch.stack(losses).sum() / total, torch.stack([each.overlap.detach().mean() for each in verdicts]))
