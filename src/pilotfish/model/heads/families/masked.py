"""P-EAGLE: EAGLE-3's rows, and in a root's forward a chain of mask rows below it, each of which gives a level.

position   0 ......... p - 1    p       p + 1 ... p + depth - 1
embedding  tokens               root    mask ....
state      features             its own the mask's
KV         in slots of tokens           in slots of the forward's chains: nobody sees it later
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, Sampling, SequenceRows
from pilotfish.model.batch import Batch
from pilotfish.model.heads.executor import HeadExecutor, HeadLogits, HeadSetup
from pilotfish.model.heads.families.eagle import LAYERS, MIDLAYER, MakeHead, input_ids, wide_layout
from pilotfish.model.heads.families.layout import HeadLayout, HeadSource
from pilotfish.model.heads.families.recurrent import RecurrentHead, RecurrentRows
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.parts import Parts, Project
from pilotfish.model.heads.roots import ROOTS, KeptRow, RootSlots, kept_rows
from pilotfish.model.heads.spec import FINAL, Decoder, HeadFiles, HeadMemory, HeadSpec, Projection, Shapes

#: Chains that one forward takes.
CHAINS = 32


@dataclass(frozen=True, kw_only=True)
class MaskedHead(RecurrentHead):
    """Rows of tokens to come have the embedding of `mask_token` and, in place of a feature, the projection of
    `mask_hidden` [1, 1, parts * target_hidden]; they see what is above them, and no state is recycled."""

    depth: int  # tokens that one forward gives below a root, at least 2: the root's own row gives the first
    mask_token: int

    def shapes(self, spec: HeadSpec, vocab: int) -> Shapes:
        mask = {"mask_hidden": (1, 1, len(self.projection.layers) * spec.target_hidden)}
        return super().shapes(spec, vocab) | mask

    @property
    def guesses(self) -> str:
        return f"{self.depth} tokens at once, {self._by_layers()}"

    def memory(self) -> HeadMemory:
        decoder = self.decoder
        roots = self.depth * (CHAINS * decoder.kv_size + ROOTS * decoder.hidden)
        return super().memory()._replace(roots=roots)

    def executor(self, files: HeadFiles, setup: HeadSetup) -> HeadExecutor:
        return MaskedExecutor(files, setup)


class MaskedExecutor(HeadExecutor):
    """Nodes have no rows: those of one depth have the same children."""

    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(MaskedHead, files.spec.head)
        chains = CHAINS * (head.depth - 1)
        self.rows = RecurrentRows(files, replace(setup, num_slots=setup.num_slots + chains))
        super().__init__(head.projection.width, setup, head.context, self.rows.vocab, self.rows.buckets)
        self.deepest = head.depth
        self._slots = RootSlots(self._chains_below, self._logits, self.padded, head.depth, 0)
        self._mask_token, self._own = head.mask_token, setup.num_slots + np.arange(chains, dtype=np.int32)
        parts = Parts(files.tensors, setup.kernels(head.decoder.head_dim), setup.dtype)
        project = Project.of(head.projection, parts)
        self._mask = project(parts.tensor("mask_hidden").flatten(0, 1))  # [1, hidden]

    def run(self, rows: Sequence[SequenceRows], sampling: Sampling) -> HeadLogits:
        committed = [structs.replace(s, nodes=NO_NODES) for s in rows if len(s.tokens)]
        fresh = self._commit(committed) if committed else {}
        kept = [row for s in rows for row in kept_rows(s)]
        return self._slots.below(kept, sampling, fresh) if kept else HeadLogits(torch.zeros(0, self.vocab.size))

    def _commit(self, rows: Sequence[SequenceRows]) -> dict[int, Tensor]:
        """States [depth, hidden] of the kept roots, by slot."""
        for s in rows:
            self._slots.forget(s.prefix_slots[s.start :].tolist())
        roots = [row for s in rows for row in kept_rows(s)]
        own, below = self._forward(rows, roots)
        states = torch.cat((own[:, None], below), dim=1)
        return {row.root: state for row, state in zip(roots, states.unbind(), strict=True)}

    def _chains_below(self, roots: Sequence[KeptRow]) -> Tensor:
        """[roots, depth, hidden] for roots whose own rows ran before: the first level is NaN."""
        below = self._forward((), roots)[1]
        return torch.cat((torch.full_like(below[:, :1], torch.nan), below), dim=1)

    def _forward(self, committed: Sequence[SequenceRows], roots: Sequence[KeptRow]) -> tuple[Tensor, Tensor]:
        """`lm_head`'s inputs for kept rows [kept, hidden] and for the chains below roots [roots, chain, hidden]."""
        forwards = [self._chains(roots[first : first + CHAINS]) for first in range(0, max(len(roots), 1), CHAINS)]
        forwards[0] = [*committed, *forwards[0]]
        outputs = torch.cat([self._outputs(rows) for rows in forwards])
        kept = sum(len(s.kept) for s in committed)
        return outputs[:kept], outputs[kept:].view(len(roots), self.deepest - 1, outputs.shape[1])

    def _chains(self, roots: Sequence[KeptRow]) -> list[SequenceRows]:
        length = self.deepest - 1
        tokens, depths = np.full(length, self._mask_token), np.arange(1, length + 1)
        own = self._own[: len(roots) * length].reshape(-1, 1, length)
        paths = np.broadcast_to(own, (len(roots), length, length))
        return [
            SequenceRows(len(root.prefix), (), root.prefix, NodeRows(tokens, depths, slots), ())
            for root, slots in zip(roots, paths, strict=True)
        ]

    def _outputs(self, rows: Sequence[SequenceRows]) -> Tensor:
        batches = Batch.build(rows, self.buckets, self.num_slots + len(self._own))
        states, outputs, first = self._states_before(rows, sum(len(batch.input_ids) for batch in batches)), [], 0
        for batch in batches:
            end = first + len(batch.input_ids)
            outputs.append(self.rows(batch, states[first:end]).outputs[: batch.num_kept])
            first = end
        return torch.cat(outputs)

    def _states_before(self, rows: Sequence[SequenceRows], padded: int) -> Tensor:
        """[padded, hidden]; the mask's where a feature is unknown."""
        states, row = self._mask.repeat(padded, 1), 0
        for s in rows:
            if s.features is not None:
                known = np.flatnonzero(np.isfinite(s.features).all(axis=1))
                values = self.feature_values(torch.from_numpy(s.features[known]))
                states[torch.from_numpy(row + known).to(self._device)] = values.to(states.dtype)
            row += s.num_rows
        return states

    def _logits(self, states: Tensor, which: Tensor, _tokens: Tensor, _sampling: Sampling) -> HeadLogits:
        return HeadLogits(self.rows.module.lm_head(states).index_select(0, which.to(self._device)).float())


# -- layouts: speculators', and the flat one that vLLM reads beside it. Both count layers by what they get, and have
# EAGLE-3's tensors and `mask_hidden`. `norm_output` says nothing here: no state goes back into a head.

_NAMES = MIDLAYER | LAYERS
#: The flat layout's names of the mask's token: trainers use the first, vLLM the others.
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
#: Tokens of a forward where nobody says: those that trainers take.
_DEPTH = 8
#: Tokens of a forward, at most.
_DEEPEST = 256


def is_peagle(source: HeadSource) -> bool:
    fields = source.fields
    told = fields.take("speculators_model_type") == "peagle" or any(fields.has(name) for name in _MASKS[1:])
    return told or "mask_hidden" in source.headers


def speculators(source: HeadSource) -> HeadLayout:
    inner = source.open_wrapper("peagle")
    head = _masked(source, _MASKS[:1], _proposed(source))
    return wide_layout(source, inner, _NAMES, "speculators", input_ids(source), head, kind="peagle")


def vllm(source: HeadSource) -> HeadLayout:
    fields = source.fields
    fields.only("parallel_drafting", True, "there is a mask, which heads that guess one token at a time have not")
    several = fields.within("eagle_config").flag("use_aux_hidden_state", True)
    head = _masked(source, _MASKS, fields.count("num_depths", _DEPTH, least=2, most=_DEEPEST))
    layers = input_ids(source) if several else (FINAL,)
    return wide_layout(source, fields, _NAMES, "vllm", layers, head, kind="peagle")


def _masked(source: HeadSource, masks: tuple[str, ...], depth: int) -> MakeHead:
    fields = source.fields
    fields.flag("norm_output", False)
    residual, mask = fields.flag("norm_before_residual", False), _mask_token(source, masks)

    def made(projection: Projection, decoder: Decoder) -> MaskedHead:
        if 0 < decoder.window < depth:
            raise source.refused(f"has a window of {decoder.window}, less than the {depth} tokens of a forward")
        return MaskedHead(projection, decoder, "wide", residual_normed=residual, depth=depth, mask_token=mask)

    return made


def _mask_token(source: HeadSource, names: tuple[str, ...]) -> int:
    fields, vocab = source.fields, source.target.vocab
    said = {name: fields.count(name, least=0, most=vocab - 1) for name in names if fields.has(name)}
    if not said:
        raise source.refused(f"names no token of its mask: {' or '.join(names)} in its config.json")
    first, *others = said
    for name in others:
        if said[name] != said[first]:
            raise fields.refused(name, f"{said[first]}, as {first} says")
    return said[first]


def _proposed(source: HeadSource) -> int:
    outer = source.fields.within("speculators_config")
    methods = outer.take("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        raise outer.refused("proposal_methods", "a list of objects, at least one")
    first = HeadFields(methods[0], source.fields.path, "speculators_config.proposal_methods[0].")
    return first.count("speculative_tokens", least=2, most=_DEEPEST)
