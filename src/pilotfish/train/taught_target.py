"""Any served model, as transformers runs it, frozen."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

from pilotfish.errors import ParameterError
from pilotfish.model.heads.spec import FINAL
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.loader import load_dense
from pilotfish.model.loading.metadata import load_tokenizer, read_generation_config
from pilotfish.model.loading.precision import library_dtype
from pilotfish.train.heads.trainee import Lesson, Shared, Trainee
from pilotfish.train.trainer import Learnt

#: Targets whose layers are like those of heads, which can start from them.
LIKE_HEADS = ("llama", "mistral", "qwen2", "qwen3")


class TaughtTarget:
    """ModelError for a model that is not served."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory, self.device = directory, device
        self.config: Any = load_config(directory)
        self.tokenizer: Any = load_tokenizer(directory)
        dtype = library_dtype(torch.bfloat16, device)
        self.module: Any = load_dense(directory, self.config, dtype).to(device).eval().requires_grad_(False)
        served = read_generation_config(directory, self.config.eos_token_id, self.config.vocab_size)
        ends = sorted(served.eos_ids)
        # of its own file nothing else: a draft learns the distribution itself
        self.module.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0] if ends else 0)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    def shared(self, draft_ids: Tensor | None) -> Shared:
        """`draft_ids`: the tokens that a draft can say; None: all."""
        embedding: Tensor = self.module.get_input_embeddings().weight
        output: Tensor = self.module.get_output_embeddings().weight
        said = slice(None) if draft_ids is None else draft_ids
        like_heads = self.config.model_type in LIKE_HEADS
        norm = self.module.base_model.norm.weight if like_heads else torch.ones(embedding.shape[1])
        layers = [layer.state_dict() for layer in self.module.base_model.layers] if like_heads else []
        return Shared(embedding.float(), output.float()[said], norm.float(), layers)

    def forward(self, tokens: Tensor, positions: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Hidden states of layers side by side, float32 [rows, length, layers * hidden]; logits."""
        result = self.module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=torch.ones_like(tokens),  # or positions that jump would be read as another text's
            output_hidden_states=True,
            use_cache=False,
        )
        # FINAL is the last entry
        return torch.cat([result.hidden_states[layer] for layer in layers], -1).float(), result.logits

    def feature_layers(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Default: a low one, the middle and a high one; for deep targets EAGLE-3's usual ones."""
        last = self.layers - 1
        if not wanted:
            usual = (2, self.layers // 2, self.layers - 3) if self.layers >= 8 else (1, self.layers // 2, last)
            return tuple(dict.fromkeys(min(max(layer, 0), last) for layer in usual))
        if not all(0 <= layer <= last for layer in wanted) or len(set(wanted)) < len(wanted):
            raise ParameterError("feature_layers", wanted, f"distinct layers 0 to {last} of {self.directory}")
        return wanted


assert FINAL == -1  # `forward` takes it as an index


# -- what a head learns from it

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
