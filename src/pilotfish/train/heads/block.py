"""DSpark in training: many blocks of a text at once, each below an anchor that was drawn. A block's rows, its anchor
and masks, see each other and the features of all tokens before the anchor. Row k guesses the token after position k,
corrected by what usually follows the token before that guess."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pilotfish.model.heads.families.block import BlockHead
from pilotfish.train.heads.trainee import Chains, Layer, Lesson, Norm, Shared, Trainee, scores_of


class BlockTrainee(Trainee):
    """Places of a lesson are its anchors."""

    def __init__(self, head: BlockHead, shared: Shared) -> None:
        super().__init__(head.projection, shared)
        self.head, decoder = head, head.decoder
        self.layers = nn.ModuleList(Layer(decoder) for _ in range(decoder.layers))
        self.norm = Norm(decoder.hidden, decoder.eps)
        vocab, draft_vocab, rank = len(shared.embedding), len(shared.output), head.markov_rank
        self.markov = nn.ModuleDict({"w1": nn.Embedding(vocab, rank), "w2": nn.Linear(rank, draft_vocab, bias=False)})
        self.confidence = nn.Linear(decoder.hidden + rank, 1)

    def forward(self, lesson: Lesson) -> Chains:
        hidden = self.norm(self._blocks(lesson))  # [rows, anchors, block, hidden]
        logits, confidence = [], []
        for slot in range(self.head.block):
            before = self.markov["w1"](lesson.tokens.gather(1, lesson.places + slot))
            logits.append(self.logits(hidden[:, :, slot]) + self.markov["w2"](before))
            seen = torch.cat((hidden[:, :, slot], before), -1).detach()
            confidence.append(self.confidence(seen)[..., 0].float())
        return Chains(logits, confidence)

    def _blocks(self, lesson: Lesson) -> Tensor:
        block, anchors = self.head.block, lesson.places
        tokens = F.pad(lesson.tokens.gather(1, anchors)[..., None], (0, block - 1), value=self.head.mask_token)
        slots = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
        positions = lesson.positions.gather(1, slots)  # [rows, anchors * block]
        before = torch.arange(lesson.tokens.shape[1], device=anchors.device) < anchors[..., None]
        context, x = self.features(lesson.states), self.embed(tokens.flatten(1))
        for layer in cast(list[Layer], self.layers):
            normed = layer.input_layernorm(x)
            attended = self._attend(layer, normed, positions, context, lesson.positions, before)
            x = layer.after(x, attended)
        return x.view(*anchors.shape, block, -1)

    def _attend(
        self, layer: Layer, x: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor, before: Tensor
    ) -> Tensor:
        """Rows of blocks over the context before their anchors, `before` [rows, anchors, length], and their block."""
        block = self.head.block
        queries = layer.self_attn.queries(x, positions)
        keys, values = layer.self_attn.keys(context, context_positions)
        own = layer.self_attn.keys(x, positions)
        visible = before.repeat_interleave(block, 1)[:, None, None]
        scores = scores_of(queries, keys).masked_fill(~visible, -torch.inf)
        by_block = queries.view(*queries.shape[:3], -1, block, queries.shape[-1])
        own_keys, own_values = (each.reshape(*each.shape[:2], 1, -1, block, each.shape[-1]) for each in own)
        beside = (by_block @ own_keys.transpose(-1, -2)).float().flatten(3, 4)
        weights = torch.cat((scores, beside), -1).softmax(-1).to(queries.dtype)
        length = context.shape[1]
        inside = weights[..., length:].reshape(*by_block.shape[:-1], block) @ own_values
        attended: Tensor = weights[..., :length] @ values.unsqueeze(2) + inside.flatten(3, 4)
        return attended
