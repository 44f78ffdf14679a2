"""The draft worker: a socket, a clock and a model around the draft's machine (core/drafting/draft_machine.py)."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.core.drafting.draft_machine import REPORT, DraftMachine
from pilotfish.core.drafting.draft_sessions import LevelPart, SessionTable, add_children
from pilotfish.core.drafting.vocabulary_map import MappedVocabulary
from pilotfish.core.sampling.constraint import MAX_LENGTH, Bits, MaskedPaths, MaskMaker, masks_when_asked
from pilotfish.core.scheduling.executor import (
    NO_NODES,
    NO_SAMPLING,
    Executor,
    NodeRows,
    Sampling,
    SequenceRows,
    TokenMasks,
)
from pilotfish.core.trees.lookahead import NewNodes, path_table
from pilotfish.errors import UnknownTypeError, WireError
from pilotfish.wire.channel import Channel, Received, decode_to_draft, send_all, type_of
from pilotfish.workers.records import LevelRecord

if TYPE_CHECKING:  # imports transformers
    from pilotfish.model.pacer import Pacer

logger = logging.getLogger(__name__)

HANDLING = 0.01  # seconds after which the remaining frames wait for the next level
#: Bytes of a frame beside the tokens of a sequence as long as the draft's context (5 bytes each at most): a constraint
#: in UTF-8, and the rest.
FRAME_BASE = 4 * MAX_LENGTH + (1 << 20)


@dataclass(eq=False)
class DraftWorker:
    machine: DraftMachine
    grower: "Grower"
    channel: Channel
    clock: Callable[[], float] = time.perf_counter
    ended: Callable[[], None] = lambda: None  # called when it has
    observe: Callable[[LevelRecord], None] = lambda _: None

    def __post_init__(self) -> None:
        self._stopping = False
        self._inbox: deque[Received] = deque()
        self._largest_frame = FRAME_BASE + 5 * self.grower.executor.context
        self._observed_used = self._observed_wasted = 0

    def run(self) -> None:
        busy = True
        try:
            while not self._stopping:
                busy = self.turn(0.0 if busy else REPORT)
        finally:
            self.ended()

    def stop(self) -> None:
        """From any thread, or a signal's handler."""
        self._stopping = True
        self.channel.wake()

    def turn(self, timeout: float) -> bool:
        """Take frames, waiting up to `timeout` seconds for one, and grow a level; whether anything was done."""
        self._take_all(timeout)
        self.machine.tick(self.clock())
        self._send()
        level = self.machine.next_level(self.clock())
        if level:
            self._send()
            began = self.clock()
            added = self.grower.grow(level)
            ended = self.clock()
            self.machine.level_done(level, added, began, ended)
            self._send()
            self._record(level, added, began, ended)
        return bool(level or self._inbox)

    def _take_all(self, timeout: float) -> None:
        """For HANDLING seconds at most, so that targets that send much delay nobody's trees."""
        if not self._inbox:
            self._inbox.extend(self.channel.receive(timeout))
        until = self.clock() + HANDLING
        while self._inbox:
            self._take(self._inbox.popleft())
            if self.clock() > until:
                return

    def _take(self, received: Received) -> None:
        try:
            if len(received.frame) > self._largest_frame:
                context = self.grower.executor.context
                raise WireError(f"frame: {len(received.frame)} bytes; a context of {context} needs fewer")
            message = decode_to_draft(received.frame)
        except UnknownTypeError as error:
            self.machine.unknown(received.peer, error.kind, self.clock())
            return
        except WireError as error:
            self.machine.malformed(received.peer, str(error), self.clock(), type_of(received.frame))
            return
        self.machine.receive(received.peer, message, self.clock(), received.tenant, received.weight)

    def _send(self) -> None:
        send_all(self.machine.outbox, self.channel.send)  # lost ones show as gaps
        for notice in self.machine.notices:
            logger.log(notice.level, "%s", notice.text)
        self.machine.notices.clear()

    def _record(self, level: Sequence[LevelPart], added: Sequence[NewNodes], began: float, ended: float) -> None:
        used, wasted = self.machine.used, self.machine.wasted
        self.observe(
            LevelRecord(
                began,
                ended,
                sessions=len(level),
                leaves=sum(len(part.leaves) for part in level),
                prompt_rows=sum(part.pending for part in level),
                nodes=sum(map(len, added)),
                used=used - self._observed_used,
                wasted=wasted - self._observed_wasted,
            )
        )
        self._observed_used, self._observed_wasted = used, wasted


@dataclass
class Grower:
    executor: Executor
    table: SessionTable
    children: int  # that each leaf gets
    pacer: "Pacer | None" = None  # holds back each level
    masks: MaskMaker = masks_when_asked

    def grow(self, level: Sequence[LevelPart]) -> list[NewNodes]:
        pace = nullcontext() if self.pacer is None else self.pacer.held(sum(part.rows for part in level))
        with pace:
            self.table.allocate(level)
            masks = self._masks(level)
            outcome = self.executor.execute(self._rows(level), sampling_of(level, self.children, masks))
            self.table.computed(level)
            if outcome.log_chances is None:
                return [NewNodes()] * len(level)
            return add_children(
                level, outcome.tokens, outcome.log_chances, self.table.calibrations, self.executor.deepest
            )

    def _masks(self, level: Sequence[LevelPart]) -> TokenMasks | None:
        groups, first = dict[int, MaskedGroup](), 0
        for part in level:
            session = part.session
            if part.leaves and (state := session.grammar_state()) is not None:
                group = groups.setdefault(id(session.vocabulary), self._group(session.vocabulary))
                group.samples += range(first, first + len(part.leaves))
                group.paths.append(MaskedPaths(state, [session.tree.path_tokens(leaf) for leaf in part.leaves]))
            first += len(part.leaves)
        return masks_of(list(groups.values())) if groups else None

    def _group(self, vocabulary: MappedVocabulary | None) -> "MaskedGroup":
        if vocabulary is None:
            return MaskedGroup(self.masks, self.executor.vocab_size)
        return MaskedGroup(vocabulary.masks, vocabulary.map.size)

    def _rows(self, level: Sequence[LevelPart]) -> list[SequenceRows]:
        nodes, used, rows = leaf_rows([part for part in level if not part.pending]), 0, []
        for part in level:
            slots = part.session.slots
            if part.pending:
                start = len(slots) - part.pending
                inputs, known = part.session.inputs[start : len(slots)], self.executor.vocab_size
                tokens = [token if token < known else 0 for token in inputs]  # 0 in place of those that it lacks
                kept, log = [part.pending - 1] if part.leaves else [], part.session.features
                features = None if log is None else log.of_rows(start, part.pending)
                rows.append(SequenceRows(start, tokens, slots, NO_NODES, kept, features))
            else:
                span, used = nodes.span(used, used + part.rows), used + part.rows
                rows.append(SequenceRows(len(slots), [], slots, span, kept=()))
        return rows


@dataclass
class MaskedGroup:
    maker: MaskMaker
    vocab_size: int
    samples: list[int] = field(default_factory=list)
    paths: list[MaskedPaths] = field(default_factory=list)


def masks_of(groups: Sequence[MaskedGroup]) -> TokenMasks:
    """All groups' masks as one; those of smaller vocabularies allow nothing beyond."""

    def start() -> Callable[[], Bits]:
        waiting = [group.maker(group.paths, group.vocab_size) for group in groups]
        return lambda: _stacked([wait() for wait in waiting])

    return TokenMasks(np.array([sample for group in groups for sample in group.samples]), start)


def _stacked(masks: Sequence[Bits]) -> Bits:
    widest = max(bits.shape[1] for bits in masks)
    return np.concatenate([np.pad(bits, ((0, 0), (0, widest - bits.shape[1]))) for bits in masks])


def leaf_rows(level: Sequence[LevelPart]) -> NodeRows:
    leaves = [(part.session, leaf) for part in level for leaf in part.leaves]
    tokens = np.array([session.input_at(leaf) for session, leaf in leaves], np.int64)
    depths = np.array([session.tree.depth(leaf) for session, leaf in leaves], np.int64)
    return NodeRows(tokens, depths, path_table([session.tree.path(leaf) for session, leaf in leaves]))


def sampling_of(level: Sequence[LevelPart], children: int, masks: TokenMasks | None = None) -> Sampling:
    sessions = [part.session for part in level]
    leaves = [(place, leaf) for place, part in enumerate(level) for leaf in part.leaves]
    if not leaves:
        return NO_SAMPLING
    sequences = np.array([place for place, _ in leaves])
    positions = np.array([sessions[place].length_at(leaf) for place, leaf in leaves])
    ruled = any(session.rules is not None for session in sessions)
    edits = [sessions[place].edits_at(leaf) for place, leaf in leaves] if ruled else ()
    params, seeds = [session.params for session in sessions], [session.seed for session in sessions]
    mapped = any(session.text is not None for session in sessions)
    shared = [None if session.text is None else session.text.map.shared for session in sessions] if mapped else ()
    return Sampling(None, params, seeds, sequences, positions, edits, masks, children, shared)
