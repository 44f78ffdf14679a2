"""Drafts elsewhere, as an engine has them: draft workers, which it starts, or pools that it is told of; and a socket, a
clock and a lock around the target's machine (target_machine.py). Imports no torch, which a target imports while
its workers load.

step loop         propose: the best nodes of each local copy        commit: re-root the copy, post the tokens
───────────────────────────── one lock, held for microseconds ─────────────────────────────────────────────
channel's thread  Tree: attach to the copy       Load: the pool lives       Resync: open anew at the next step
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import model_name
from pilotfish.config.text import config_text
from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.drafting.messages import (
    PROTOCOL_VERSION,
    TARGET_CAPABILITIES,
    FeatureOffer,
    FeatureRows,
    Hello,
    Peer,
)
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.drafting.vocabulary import added_tokens, tokenizer_digest
from pilotfish.core.features.feature_rows import coded, feature_type
from pilotfish.core.features.feature_sending import FeaturePiece, frames_of, row_bytes
from pilotfish.core.features.features import FeatureSource
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Forest, Guesses
from pilotfish.engine.drafts.pool_members import PoolMembers
from pilotfish.engine.memory import device_named
from pilotfish.engine.processes.launch import Supervisor, WorkerState, wait_until
from pilotfish.engine.processes.placement import split_cores
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.engine.targets.members import Member
from pilotfish.errors import EngineError, ModelError, UnknownTypeError, WireError
from pilotfish.model.heads.target import TargetFacts
from pilotfish.wire.channel import ChannelThread, Received, decode_to_target, framed, type_of
from pilotfish.wire.curve_keys import KeyPair, TargetKeys, load_key_pair, load_target_keys
from pilotfish.wire.endpoints import check_spelling
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

#: Seconds that a worker may take to load, and a pool to answer.
LOADING, ANSWER = 600.0, 5.0
#: More pools than a target has.
MANY_POOLS = 1 << 16
#: Starts again after which a worker that never served is given up.
MAX_RESTARTS = 3
#: Seconds after which a thread that holds the interpreter gives way: between two forwards the step loop must not wait
#: for the thread that owns the channel as long as Python's own 5 ms.
SWITCH_INTERVAL = 0.0002


class RemoteDrafts:
    """The pools that `config` names, those that it is told of while it runs or, where it names none, draft workers,
    which start when this is made and run until `close`."""

    drafter: RemoteDrafter  # once `connect` has made it

    def __init__(self, config: EngineConfig) -> None:
        """ParameterError for cores, and a device, that cannot be used."""
        self.cores = config.core_set  # of the target; empty: wherever the system likes
        self.taken = frozenset[int]()  # cores of the workers
        self._config = config
        self._open = ExitStack()
        self._supervisor: Supervisor | None = None
        self.endpoints, self._names = config.draft_pool, ("",) * len(config.draft_pool)
        if config.starts_drafts:
            self._names = tuple(f"draft {i}" for i in range(config.draft_workers))
            self._start_workers(self._names)

    def _start_workers(self, names: Sequence[str]) -> None:
        config, own = self._config, frozenset(os.sched_getaffinity(0))
        if config.draft_device:
            device_named(config.draft_device, "draft_device")
        placement = split_cores(own, config.cores, config.draft_cores, len(names))
        self.cores, self.taken = placement.target, placement.taken
        self._supervisor = supervisor = Supervisor()
        self._open.callback(supervisor.close)
        self.endpoints = tuple(f"ipc://{supervisor.directory}/draft-{i}" for i in range(len(names)))
        workers = zip(names, self.endpoints, placement.workers, strict=True)
        supervisor.start(
            [WorkerSpec(name, worker_command(config, endpoint, name), cores) for name, endpoint, cores in workers]
        )

    def connect(
        self,
        tokenizer: Any,
        vocab_size: int,
        source: FeatureSource | None = None,
        offer: FeatureOffer | None = None,
    ) -> RemoteDrafter:
        """The drafter of a target with this tokenizer, and maybe with features, once every pool serves or refuses the
        target or, where drafts are optional, it is clear that one does not. ModelError for a pool that cannot be
        reached and for workers that cannot use what they were given, EngineError for a worker that does not start."""
        config = self._config
        keys = load_target_keys(config.draft_key, config.draft_pool_key, len(self.endpoints))
        own = None if config.draft_key is None else load_key_pair("draft_key", config.draft_key)
        channel = DialingChannel((), secrets.token_bytes(8), insecure=config.insecure)
        thread = ChannelThread(channel)
        hello = hello_of(config, tokenizer, vocab_size, offer)
        first, each = secrets.randbelow(MANY_POOLS), config.draft_pools_each
        options = RemoteOptions(config.wanted, salt_key=salt_key(own), pools_each=each, first_pool=first)
        drafter = self.drafter = RemoteDrafter(hello, (), thread.post, options, channel.problem, source=source)
        self._channel = channel
        known_by = "" if offer is None else TargetFacts.read(config.target).digest()
        self._members = PoolMembers(channel, thread, own, partial(_draft_pool, known_by), drafter)
        self._open.callback(sys.setswitchinterval, sys.getswitchinterval())
        self._open.callback(thread.close)
        sys.setswitchinterval(SWITCH_INTERVAL)
        thread.start(drafter.receive, drafter.tick)
        self._members.begin(pool_members("draft", self.endpoints, keys, self._names))
        self.wait(optional=config.draft_optional)
        return drafter

    @property
    def pools(self) -> Sequence[DraftPool]:
        """Those that there are at present, once `connect` has dialled the first ones."""
        return self.drafter.machine.pools

    def set_pools(self, members: Sequence[Member]) -> None:
        """From now on there are these pools; by one thread at a time, after `connect`. The sequences of one that leaves
        or drains go to others, and no token changes."""
        self._members.set(members)

    def wait(self, *, optional: bool) -> None:
        """Until every pool serves or refuses or, where that is `optional`, it is clear that one does neither."""
        deadline = time.monotonic() + self._patience
        for pool in self.pools:
            self._wait_for(pool, deadline - time.monotonic(), optional)

    @property
    def _patience(self) -> float:
        return LOADING if self._config.starts_drafts else ANSWER

    def close(self) -> None:
        """Leave the pools; end the workers. Idempotent."""
        self._open.close()

    def workers(self) -> Sequence[WorkerState]:
        """Of this engine."""
        return () if self._supervisor is None else self._supervisor.poll()

    def _wait_for(self, pool: DraftPool, timeout: float, optional: bool) -> None:
        try:
            wait_until(lambda: pool.ready or self._refuses(pool), lambda: self._in_vain(pool), timeout, pool.name)
        except EngineError:
            late = f"draft_pool: {pool.name}: not ready within {self._patience:g} s"
            reason = self._in_vain(pool) or self._channel.problem(pool.peer) or late
            if not optional:
                raise (EngineError if self._crashing() else ModelError)(reason) from None
            logger.warning("%s; the target serves without it", reason)

    def _refuses(self, pool: DraftPool) -> bool:
        """Whether a pool that somebody else runs has said that it does not serve this target, as its notice tells: the
        target does without it until it serves."""
        return pool.refusal is not None and self._supervisor is None

    def _in_vain(self, pool: DraftPool) -> str | None:
        """Why waiting for it would help nothing."""
        if pool.refusal is not None:
            return f"draft_pool: {pool.name} refused: {pool.refusal}"
        down = (state for state in self.workers() if state.status == "failed" or state.restarts >= MAX_RESTARTS)
        return next((state.problem for state in down if state.problem), None)

    def _crashing(self) -> bool:
        """Whether it is the workers, not what they were given, that are to blame."""
        return self._supervisor is not None and all(state.status != "failed" for state in self.workers())


def hello_of(config: EngineConfig, tokenizer: Any, vocab_size: int, offer: FeatureOffer | None = None) -> Hello:
    """How a target greets its pools."""
    digest, added = tokenizer_digest(tokenizer), added_tokens(tokenizer)
    name, can = model_name(config.target), list(TARGET_CAPABILITIES)
    return Hello(PROTOCOL_VERSION, digest, vocab_size, name, added, offer, capabilities=can)


def _draft_pool(target_digest: str, member: Member, peer: Peer) -> DraftPool:
    return DraftPool(member.label, peer, target_digest=target_digest)


def worker_command(config: EngineConfig, endpoint: str, name: str) -> list[str]:
    """The command line of one, which starts from the configuration of its engine, less the target's cores: a worker may
    not use them."""
    own = {"config": config_text(replace(config, cores="")), "listen": endpoint, "name": name}
    return [sys.executable, "-m", "pilotfish", "draft", *(f"--{option}={value}" for option, value in own.items())]


def pool_members(
    role: str, endpoints: Sequence[str], keys: Sequence[TargetKeys | None], names: Sequence[str]
) -> list[Member]:
    """Pools that are there from the start to the end. ParameterError for an endpoint that is none."""
    for endpoint in endpoints:
        check_spelling(f"{role}_pool", endpoint)
    pools = zip(endpoints, keys, names, strict=True)
    return [Member(endpoint, "" if own is None else own.pool, name) for endpoint, own, name in pools]


def salt_key(own: KeyPair | None) -> bytes:
    """For the digests of salts, so that no pool can try which salt has one. Targets that hold the same key have it in
    common; without one it is this process's own."""
    if own is None:
        return secrets.token_bytes(32)
    return hashlib.blake2b(own.secret.encode(), person=b"pilotfish salts", digest_size=32).digest()


class RemoteDrafter(Drafter):
    """Implements `Drafter` over the trees that pools push. The target waits for nothing here."""

    def __init__(
        self,
        hello: Hello,
        pools: Sequence[DraftPool],
        post: Callable[..., None],
        options: RemoteOptions,
        problem: Callable[[Peer], str | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        source: FeatureSource | None = None,
    ) -> None:
        """`post` sends frames to a peer; from any thread, without waiting. `problem` tells why a pool is not
        connected. `source` has the features that `hello` offers; only the step loop's thread reads it."""
        self._source, self._offer = source, hello.features
        self.machine = TargetMachine(hello, pools, options)
        self._post = post
        self._problem = problem
        self._clock = clock
        self._lock = threading.Lock()

    @contextmanager
    def _turn(self) -> Iterator[float]:
        """The machine's turn, and the present time for it. Its messages are posted in order."""
        with self._lock:
            yield self._clock()
            if self.machine.outbox:
                for peer, frames in framed(self.machine.outbox).items():
                    self._post(peer, *frames)
                self.machine.outbox.clear()
            for pool in self.machine.pools:
                for notice in pool.notices:
                    logger.log(notice.level, "%s", notice.text)
                pool.notices.clear()

    # -- the step loop: the Drafter protocol

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        with self._turn() as now:
            return self.machine.propose(requests, limits.nodes, now)

    def expect(self, requests: Sequence[Request]) -> None:
        with self._turn() as now:
            self.machine.expect(requests, now)

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        with self._lock:
            self.machine.verified(requests, trees)

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """The draft is told by `flush`, or with what it is told next."""
        with self._lock:
            return self.machine.commit(request, tokens, self._clock())

    def flush(self) -> None:
        """All that waits is posted, and the features that are due. They are read without the lock."""
        pieces, frames = self._features()
        with self._turn() as now:
            self.machine.send_features(pieces, frames, now)

    def _features(self) -> tuple[Sequence[FeaturePiece], Sequence[FeatureRows]]:
        """Those that are due, of all sequences together."""
        if self._source is None or self._offer is None:
            return (), ()
        kind = feature_type(self._offer.dtype)
        with self._lock:
            pieces = self.machine.due_features(row_bytes(self._offer.width, kind), self._clock())
        if not pieces:
            return (), ()
        found = self._source.features(np.concatenate([piece.slots for piece in pieces]))
        return pieces, frames_of(pieces, coded(found, kind), kind)

    def pause(self, request: Request) -> None:
        with self._turn():
            self.machine.pause(request)

    def close(self, request: Request) -> None:
        with self._turn():
            self.machine.close(request)

    def pool_of(self, request: Request) -> DraftPool | None:
        """The pool that drafts for it now."""
        with self._lock:
            session = self.machine.session(request)
            return None if session is None else session.pool

    # -- the channel's thread

    def join(self, pool: DraftPool) -> None:
        with self._turn():
            self.machine.join(pool)

    def drain(self, pool: DraftPool, draining: bool) -> None:
        with self._turn():
            self.machine.drain(pool, draining)

    def leave(self, pool: DraftPool) -> None:
        with self._turn():
            self.machine.leave(pool)

    def tick(self) -> None:
        """Called often: greets the pools now and then. One that is not connected need not be silent first."""
        with self._turn() as now:
            for pool in self.machine.pools:
                if (problem := self._problem(pool.peer)) is not None:
                    pool.disconnected(problem)
            self.machine.tick(now)

    def receive(self, received: Received) -> None:
        """A frame from a pool. It is decoded before the step loop has to wait."""
        pool = self.machine.pool_at(received.peer)
        if pool is None:
            return
        try:
            message = decode_to_target(received.frame)
        except UnknownTypeError as error:
            with self._turn() as now:
                self.machine.unknown(pool, error.kind, now)
            return
        except WireError as error:
            with self._turn() as now:
                self.machine.malformed(pool, str(error), now, type_of(received.frame))
            return
        with self._turn() as now:
            self.machine.receive(pool, message, now)
