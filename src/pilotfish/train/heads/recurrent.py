"""EAGLE-3 and MTP in training: the head is unrolled on its own states, as it will draft.

Row i of a lesson is the feature of token i and the token after it. At depth k the row stands for token i + k: it has
its own state of depth k - 1 for a feature, the lesson's token i + k + 1, and that token's place in the text. It sees
rows 0 to i of depth 0, which are made of the target's features, and itself at depths 1 to k:

                    row 0    row 1    row 2    row 3
    depth 0         0        0 1      0 1 2    0 1 2 3       rows of depth 0 that it sees
    depth 1         0 0'     0 1 1'   0 1 2 2' 0 1 2 3 3'    and itself, of depth 1
"""

from typing import cast

import torch
from torch import Tensor, nn

from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.train.heads.trainee import Chains, Keys, Layer, Lesson, Norm, Shared, Trainee, scores_of


class RecurrentTrainee(Trainee):
    """Places of a lesson are 1, 2, …: row i guesses below token i + 1."""

    def __init__(self, head: RecurrentHead, shared: Shared, depth: int) -> None:
        super().__init__(head.projection, shared)
        self.head, self.depth = head, depth
        decoder = head.decoder
        wide = head.entry == "wide"
        if not wide:
            self.embed_norm = Norm(decoder.hidden, decoder.eps)
            self.input_proj = nn.Linear(2 * decoder.hidden, decoder.hidden, bias=False)
        self.hidden_norm = Norm(decoder.hidden, decoder.eps)
        self.layers = nn.ModuleList([Layer(decoder, 2 * decoder.hidden if wide else None)])
        self.norm = Norm(decoder.hidden, decoder.eps)

    def forward(self, lesson: Lesson) -> Chains:
        rows = lesson.places.shape[1]
        state = self.features(lesson.states[:, :rows])
        seen: list[Keys] = []  # of each depth so far
        logits = []
        for depth in range(self.depth):
            tokens = lesson.tokens[:, depth + 1 : depth + 1 + rows]
            out = self._row(state, self.embed(tokens), lesson.positions[:, depth : depth + rows], seen)
            normed: Tensor = self.norm(out)
            logits.append(self.logits(normed))
            state = normed if self.head.recycles_normed else out
        return Chains(logits, [])

    def _row(self, state: Tensor, embedding: Tensor, positions: Tensor, seen: list[Keys]) -> Tensor:
        """The head's output [rows, tokens, hidden]; its keys join `seen`."""
        layer = cast(Layer, self.layers[0])
        normed: Tensor = self.hidden_norm(state)
        if self.head.entry == "wide":
            residual = normed if self.head.residual_normed else state
            x = torch.cat((layer.input_layernorm(embedding), normed), -1)
        else:
            residual = self.input_proj(torch.cat((self.embed_norm(embedding), normed), -1))
            x = layer.input_layernorm(residual)
        seen.append(layer.self_attn.keys(x, positions))
        return layer.after(residual, attend_unrolled(layer.self_attn.queries(x, positions), seen))


def attend_unrolled(queries: Tensor, seen: list[Keys]) -> Tensor:
    """Over the keys of depth 0 up to each token's own, and its own of every further depth."""
    first, *own = seen
    length = queries.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
    scores = scores_of(queries, first.keys).masked_fill(later, -torch.inf)
    beside = [(queries * keys.unsqueeze(2)).float().sum(-1, keepdim=True) for keys, _ in own]
    weights = torch.cat((scores, *beside), -1).softmax(-1).to(queries.dtype)
    attended = weights[..., :length] @ first.values.unsqueeze(2)
    for index, (_, values) in enumerate(own):
        attended = attended + weights[..., length + index, None] * values.unsqueeze(2)
    return attended
