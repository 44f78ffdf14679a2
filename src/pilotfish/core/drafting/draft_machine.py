"""The draft's half of the draft protocol.

    Hello ──► Load, or Refuse          Open, Commit, Close ──► sessions change; Resync or Refuse where they cannot
    FeatureRows ──► what waits for them can be computed
    next_level ──► the caller runs the forward ──► level_done ──► a Tree for each session that has grown,
                                                                  Progress for each whose prompt is not read yet

Where slots are short a session in use may lose its KV: its target is told Pause, keeps its commits back, and gets
Resume when there is room. The machine has no model, socket or clock: `workers/draft.py` owns those, and sends `outbox`.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import msgspec

from pilotfish.core.cache.prefix_keys import KnownPrefixes
from pilotfish.core.drafting import messages
from pilotfish.core.drafting.connected_targets import ConnectedTarget, DraftIdentity
from pilotfish.core.drafting.draft_sessions import IDLE, DraftModel, DraftSession, LevelPart, SessionKey, SessionTable
from pilotfish.core.drafting.level_choice import LevelChoice, LevelShape
from pilotfish.core.features.feature_frames import FeatureIntake, FeatureNeed
from pilotfish.core.peers.fields import MAX_TEXT, Error, Peer
from pilotfish.core.peers.peer import Listener
from pilotfish.core.sampling.constraint import GrammarSource, no_grammars
from pilotfish.core.scheduling.calibration import SecondsBySize
from pilotfish.core.trees.lookahead import NewNodes
from pilotfish.errors import InputError

REPORT = 0.2  # seconds between reports of the load to each target
SILENCE = 10.0  # seconds of silence after which a target is gone
BETWEEN = 0.001  # seconds between two levels that belong to their cost; of longer ones the draft had nothing to do
#: Expected seconds of a level from which on targets are told that the draft is busy, and the factor on them.
LONG, BUSY = 0.3, 2.0
PAUSED = 5.0  # seconds after which a paused session is tried again, room or not


class DraftMachine(Listener[ConnectedTarget]):
    def __init__(
        self,
        identity: DraftIdentity,
        table: SessionTable,
        shape: LevelShape,
        context: int,
        grammars: GrammarSource = no_grammars,
        features: FeatureNeed | None = None,
    ) -> None:
        """`context`: tokens of the longest sequence that the model takes. `features`: a trained head's needs."""
        super().__init__()
        self.identity = identity
        self.table = table
        self.choice = LevelChoice(table, shape)
        self.grown = self.used = 0  # nodes of trees; of them, those committed
        self.known = KnownPrefixes() if table.cache.keeps else KnownPrefixes(most=0)
        self._intake = None if features is None else FeatureIntake(features, table)
        longest = min(context, table.pool.capacity)
        self._model = DraftModel(longest, grammars, 0 if features is None else features.width)
        self._level_seconds = SecondsBySize(0.0)
        self._row_seconds = SecondsBySize(0.0)  # of a level, by its rows
        self._queue_seconds = SecondsBySize(0.0)
        self.capabilities = [
            *(messages.PAUSES, messages.ERRORS),
            *([messages.PREFIX_KEYS] if table.cache.keeps else []),
            *([] if features is None else [messages.FEATURES]),
        ]
        self._reported = -REPORT
        self._ended = 0.0  # the last level

    def tick(self, now: float) -> None:
        if now - self._reported < REPORT:
            return
        self._reported = now
        self.table.forget_idle(now)
        for peer in [peer for peer, target in self._targets.items() if now - target.heard > SILENCE]:
            for session in self.table.of(peer):
                self.table.close(session)
            self.known.forget(peer)
            del self._targets[peer]
        self._resume(now)
        self._tell_load(now)

    def _tell_load(self, now: float, busy: float = 0.0) -> None:
        own = self._own_sessions()
        for peer in self._targets:
            self._send(peer, self._load(peer, own, now, busy))

    def _own_sessions(self) -> Counter[Peer]:
        return Counter(session.key.target for session in self.table)

    def _load(self, peer: Peer, own: Counter[Peer], now: float, busy: float = 0.0) -> messages.Load:
        target = self._targets[peer]
        return messages.Load(
            self.identity.model,
            len(self.table),
            own[peer],
            target.rows,
            self.table.pool.num_available,
            1000 * self._level_seconds.at(1),
            1000 * self._queue_seconds.at(1),
            target.cached,
            self.identity.revision,
            target.last_features,
            dict(target.feature_drops),
            "" if self._intake is None else self._intake.need.target,
            messages.PROTOCOL_VERSION,
            self.capabilities if target.vocabulary is None else [*self.capabilities, messages.MAPPED],
            target.echo.stamp(now),
            self.table.pool.capacity,
            1000 * busy,
        )

    # -- messages

    def receive(self, peer: Peer, message: messages.ToDraft, now: float, tenant: str = "", weight: float = 1.0) -> None:
        """`tenant` and `weight` are those of the peer's key."""
        if isinstance(message, messages.Hello):
            self._greet(peer, message, tenant, now)
        elif peer not in self._targets:
            self._send(peer, messages.Refuse(messages.CONNECTION, 0, "no Hello came before"))
        elif isinstance(message, messages.Open):
            self._open(peer, message, tenant or peer.hex(), weight, now)
        elif isinstance(message, messages.FeatureRows):
            self._take_features(peer, message, now)
        elif isinstance(message, Error):
            self._hear_error(peer, message)
        elif not isinstance(message, messages.TreeFeedback):  # nobody asked for one
            self._follow(peer, message, now)

    def malformed(self, peer: Peer, reason: str, now: float, about: str = "") -> None:
        if self._count_malformed(peer, reason) is not None:
            self._report(peer, "malformed", about, reason, now)

    def unknown(self, peer: Peer, kind: str, now: float) -> None:
        if peer in self._targets:
            self._report(peer, "unknown_type", kind, f"messages of type {kind} are not known here", now)

    def _report(self, peer: Peer, code: str, about: str, reason: str, now: float) -> None:
        target = self._targets[peer]
        error = target.reports.of(code, about, reason, now) if messages.ERRORS in target.capabilities else None
        if error is not None:
            self._send(peer, error)

    def _hear_error(self, peer: Peer, error: Error) -> None:
        target = self._targets[peer]
        if not target.errors:
            self._note(logging.WARNING, f"{peer.hex()} could not use a frame: {error.code}: {error.reason}")
        target.errors += error.count

    def _greet(self, peer: Peer, hello: messages.Hello, tenant: str, now: float) -> None:
        known = self._targets.get(peer)
        if known is not None:
            known.greeted(hello, now)
            return
        need = None if self._intake is None else self._intake.need
        reason = self.identity.mismatch(hello, need) or self._too_many(tenant)
        if reason is not None:
            self._send(peer, messages.Refuse(messages.CONNECTION, 0, reason))
        else:
            vocabulary = self.identity.vocabulary(hello)
            target = ConnectedTarget(tenant, now, self.identity.unshared(hello), frozenset(), vocabulary)
            target.greeted(hello, now)
            self._targets[peer] = target
            self._send(peer, self._load(peer, self._own_sessions(), now))

    def _open(self, peer: Peer, message: messages.Open, tenant: str, weight: float, now: float) -> None:
        key, target = SessionKey(peer, message.session), self._targets[peer]
        before = self.table.get(key)
        if before is not None and before.generation >= message.generation:
            return
        if message.prefix_key is not None:
            prefix = self.known.find(peer, message.salt, message.prefix_key)
            if prefix is None:
                self._ask_again(peer, message, "nothing is known by its prefix_key")
                return
            message = msgspec.structs.replace(message, tokens=prefix + message.tokens, prefix_key=None)
        try:
            self._check_tokens(message, target)
            mapping = target.unshared, target.vocabulary
            session = DraftSession(key, message, tenant, weight, now, self._model, *mapping)
            self._check_length(len(session.inputs), self._model.longest)
            if before is None:
                self.table.admit(tenant)
        except InputError as error:
            if before is not None:
                self.table.close(before)
            self._send(peer, messages.Refuse(message.session, message.generation, str(error)[:MAX_TEXT]))
            return
        target.cached += self.table.open(session)
        self.known.add(peer, session.salt, session.tokens)
        if session.features is not None and session.features.reach:
            self._send(peer, messages.Skip(message.session, message.generation, session.features.reach))

    def _check_tokens(self, message: messages.Open, target: ConnectedTarget) -> None:
        self._check_length(len(message.tokens), self._model.most_tokens(target.vocabulary))
        if max(message.tokens, default=0) >= target.unshared.first or not message.tokens:
            raise InputError("tokens: they are none, or not all in the vocabulary that Hello told of")

    @staticmethod
    def _check_length(length: int, most: int) -> None:
        if length >= most:
            raise InputError(f"tokens: {length} do not fit into the {most} that the draft has")

    def _take_features(self, peer: Peer, message: messages.FeatureRows, now: float) -> None:
        if self._intake is None:
            return
        target = self._targets[peer]
        target.last_features = message.number
        reason = self._intake.take(self.table.get(SessionKey(peer, message.session)), message, now)
        if reason is not None:
            target.feature_drops[reason] += 1

    def _follow(self, peer: Peer, message: messages.OfSession, now: float) -> None:
        session = self.table.get(SessionKey(peer, message.session))
        if session is None:
            if isinstance(message, messages.Commit | messages.Resume):
                self._ask_again(peer, message, "there is no such session")
        elif message.generation < session.generation:
            return
        elif isinstance(message, messages.Close):
            self.known.add(peer, session.salt, session.tokens)
            self.table.close(session)
        elif message.generation > session.generation:
            self._ask_again(peer, message, "it was not opened")
        elif isinstance(message, messages.Commit):
            self._commit(peer, session, message, now)
        else:
            session.paused, session.touched = isinstance(message, messages.Pause), now

    def _commit(self, peer: Peer, session: DraftSession, message: messages.Commit, now: float) -> None:
        length = len(session.tokens)
        after = message.base_len + len(message.tokens)
        if after <= length:
            return
        if after > session.max_length:
            self._refuse_longer(session, after, session.max_length)
        elif message.base_len != length:
            self._ask_again(peer, message, f"base_len {message.base_len} does not follow {length}")
        elif max(message.tokens) >= session.unshared.first:
            self._ask_again(peer, message, "a token is not in the vocabulary that Hello told of")
        elif session.evicted and session.features is not None:
            self._ask_again(peer, message, "its KV went to another, and its features are gone")
        else:
            session.wanted, session.touched, session.paused = min(message.wanted, messages.MAX_NODES), now, False
            self._advance(session, message.tokens)

    def _advance(self, session: DraftSession, tokens: Sequence[int]) -> None:
        rerooted = self.table.commit(session, tokens)
        self.used += rerooted.accepted
        if len(session.inputs) > session.longest:
            self._refuse_longer(session, len(session.inputs), session.longest)
        elif session.evicted and session.parked is None:
            self._wake(session)

    def _wake(self, session: DraftSession) -> None:
        self._targets[session.key.target].cached += self.table.wake(session)

    def _refuse_longer(self, session: DraftSession, length: int, most: int) -> None:
        reason = f"tokens: {length} are more than the {most} that it can have here"
        self.table.close(session)
        self._send(session.key.target, messages.Refuse(session.key.number, session.generation, reason))

    def _ask_again(self, peer: Peer, message: messages.OfSession, reason: str) -> None:
        session = self.table.get(SessionKey(peer, message.session))
        if session is not None:
            self.table.close(session)
        self._send(peer, messages.Resync(message.session, message.generation, reason))

    # -- levels

    def next_level(self, now: float) -> list[LevelPart]:
        """Empty if nothing is to be grown. Send `outbox` before the level runs."""
        level = self.choice.next_level(now)
        self._park(now)
        seconds = self._row_seconds.at(sum(part.rows for part in level)) if level else 0.0
        if seconds > LONG:
            self._tell_load(now, BUSY * seconds)
        return level

    def _park(self, now: float) -> None:
        for session in self.table.take_evicted():
            peer = session.key.target
            in_use = now - session.touched <= IDLE and not session.paused
            if in_use and messages.PAUSES in self._targets[peer].capabilities:
                session.parked = now
                self._send(peer, messages.Pause(session.key.number, session.generation))

    def _resume(self, now: float) -> None:
        room = self.table.pool.num_available
        parked = [(session.parked, session) for session in self.table if session.parked is not None]
        for since, session in sorted(parked, key=lambda pair: pair[0]):
            room -= len(session.inputs) + self.choice.shape.leaves
            if room >= 0 or now - since > PAUSED:
                session.parked, session.touched = None, now
                self._wake(session)
                self._send(session.key.target, messages.Resume(session.key.number, session.generation))

    def level_done(self, level: Sequence[LevelPart], added: Sequence[NewNodes], began: float, now: float) -> None:
        self._level_seconds.observe(1, now - began)
        rows, spent = sum(part.rows for part in level), now - max(self._ended, began - BETWEEN)
        self._row_seconds.observe(rows, now - began)
        if rows <= self.choice.width.most and spent > 0:
            self.choice.width.observe(rows, spent)
        self._ended = now
        for part, nodes in zip(level, added, strict=True):
            session = part.session
            if part.pending:
                self._queue_seconds.observe(1, began - session.touched)
                session.read = now
            self.grown += len(nodes)
            self._targets[session.key.target].rows += part.rows
            if part.leaves:
                self._push(session, nodes)
            elif messages.PROGRESS in self._targets[session.key.target].capabilities:
                read = len(session.slots)
                self._send(session.key.target, messages.Progress(session.key.number, session.generation, read))

    def _push(self, session: DraftSession, added: NewNodes) -> None:
        nodes = (added.ids, added.parents, added.tokens, added.chances)
        tree = messages.Tree(session.key.number, session.generation, session.pushes, len(session.tokens), *nodes)
        session.pushes += 1
        self._send(session.key.target, tree)

    @property
    def wasted(self) -> int:
        return self.grown - self.used - sum(len(session.tree) for session in self.table)
