"""One level of a draft model: a forward over leaves of several trees, and their likeliest children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.core.draft_sessions import DraftSession, LevelPart, SessionTable
from pilotfish.core.lookahead import Nodes
from pilotfish.core.vocabulary import readable
from pilotfish.model.pacer import Pacer, held
from pilotfish.model.runner import NO_NODES, NodeRows, Runner, SequenceRows
from pilotfish.model.sampling import RowSampling, edited_rows, filtered, non_finite_rows, perturbed_topk, without_rows

#: b: spread of the target's log-probabilities about the draft's. With the bundled pair 0.35 and 0.5 had most
#: tokens accepted, 0.25, 0.7 and 1 fewer.
NOISE_SCALE = 0.5


@dataclass(frozen=True)
class Children:
    """The best tokens after each row, likeliest first."""

    tokens: NDArray[np.int64]  # [rows, k]
    log_chances: NDArray[np.float64]  # [rows, k], -inf where fewer than k tokens survive the filters


def likely_children(logits: torch.Tensor, rows: Sequence[RowSampling], k: int) -> Children:
    """The k tokens (or as many as there are) that the target most likely *samples* after each row.

    They are the top of draft logits / T + g with the target's own noise g. A token's chance is
    softmax((log q / T + g) / b) over the k, at T = 0 its draft probability. logits float32 [rows, vocab]; nothing is
    likely after a row that is not finite.
    """
    broken = non_finite_rows(logits)
    if broken:
        children = likely_children(without_rows(logits, broken), rows, k)
        children.log_chances[broken] = -np.inf
        return children
    logits = edited_rows(logits, rows)
    k = min(k, logits.shape[1])
    greedy = [row.params.greedy for row in rows]
    if all(greedy):
        return _children(*logits.log_softmax(dim=-1).topk(k, dim=-1))
    scores, tokens = perturbed_topk(filtered(logits, [row.params for row in rows]), rows, k)
    chances = (scores / NOISE_SCALE).log_softmax(dim=-1)
    if any(greedy):
        plain, plain_tokens = logits.double().log_softmax(dim=-1).topk(k, dim=-1)
        chosen = torch.tensor(greedy, device=logits.device)[:, None]
        chances, tokens = torch.where(chosen, plain, chances), torch.where(chosen, plain_tokens, tokens)
    return _children(chances, tokens)


def _children(log_chances: torch.Tensor, tokens: torch.Tensor) -> Children:
    return Children(tokens.cpu().numpy(), log_chances.double().cpu().numpy())


class Grower:
    """Runs levels over the sessions of a table."""

    def __init__(
        self, runner: Runner, table: SessionTable, children: int, vocab_size: int, pacer: Pacer | None = None
    ) -> None:
        """Each leaf gets `children`. `vocab_size` is the tokenizer's: models may pad theirs. `pacer` holds back each
        level."""
        self.runner = runner
        self.table = table
        self.children = children
        self.vocab_size = min(vocab_size, runner.model.shape.vocab_size)
        self.pacer = pacer

    def grow(self, level: Sequence[LevelPart]) -> list[Nodes]:
        """One forward; the nodes that it added to the tree of each part."""
        with held(self.pacer, sum(part.rows for part in level)):
            for part in level:
                self.table.allocate(part)
            logits = self.runner.forward([self._rows(part) for part in level])[:, : self.vocab_size]
            sampling = [row_sampling(part.session, leaf) for part in level for leaf in part.leaves.tolist()]
            if not sampling:
                return [Nodes.none() for _ in level]
            return _added(level, likely_children(logits, sampling, self.children))

    def _rows(self, part: LevelPart) -> SequenceRows:
        session, slots = part.session, part.session.slots
        if part.pending:
            start = len(slots) - part.pending
            tokens = readable(session.tokens[start : len(slots)], self.runner.model.shape.vocab_size)
            return SequenceRows(start, tokens, slots, NO_NODES, [part.pending - 1] if len(part.leaves) else [])
        nodes, leaves = session.tree.nodes, part.leaves
        rows = NodeRows(nodes.tokens[leaves], nodes.depths[leaves], session.tree.paths(leaves))
        return SequenceRows(len(slots), [], slots, rows, kept=())


def row_sampling(session: DraftSession, leaf: int) -> RowSampling:
    """The target's way to draw the token after the node at index `leaf`, or after the root (-1)."""
    return RowSampling(session.params, session.seed, session.length_at(leaf), session.edits_at(leaf))


def _added(level: Sequence[LevelPart], children: Children) -> list[Nodes]:
    added, row = [], 0
    for part in level:
        rows = slice(row, row + len(part.leaves))
        row = rows.stop
        tokens, log_chances = children.tokens[rows], children.log_chances[rows]
        added.append(part.session.add_children(part.leaves, tokens, log_chances) if len(part.leaves) else Nodes.none())
    return added
