"""A socket, a clock and a lock around the target's machine (core/drafting/target_machine.py). Imports no torch.

step loop         propose: the best nodes of each local copy        commit: re-root the copy; flush: post the tokens
───────────────────────────── one lock, held for microseconds ─────────────────────────────────────────────
channel's thread  Tree: attach to the copy       Load: the pool lives       Resync: open anew at the next step
"""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import model_name
from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, FeatureOffer, Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.drafting.vocabulary import added_tokens, tokenizer_digest
from pilotfish.core.features.feature_frames import frames_of, row_bytes
from pilotfish.core.features.features import FeatureSource, coded, feature_type
from pilotfish.core.peers.fields import Peer
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Forest, Guesses
from pilotfish.engine.memory import device_named
from pilotfish.engine.pools.pool_members import PoolUser
from pilotfish.engine.pools.remote_pools import RemotePools, salt_key
from pilotfish.engine.processes.placement import split_cores
from pilotfish.errors import UnknownTypeError, WireError
from pilotfish.model.heads.target import TargetFacts
from pilotfish.wire.channel import Frame, decode_to_target, type_of

MANY_POOLS = 1 << 16  # more pools than a target has


class RemoteDrafts(RemotePools[DraftPool]):
    role, without, must_answer = "draft", "the target serves without it", True
    drafter: "RemoteDrafter"  # once `connect` has made it

    def __init__(self, config: EngineConfig) -> None:
        """ParameterError for cores or a device that cannot be used."""
        super().__init__(config, config.draft_pool)
        self.taken = frozenset[int]()  # cores of the workers
        if config.starts_drafts:
            if config.draft_device:
                device_named(config.draft_device, "draft_device")
            available = frozenset(os.sched_getaffinity(0))
            placement = split_cores(available, config.cores, config.draft_cores, config.draft_workers)
            self.taken = placement.taken
            self._start_workers(placement)

    def connect(
        self, tokenizer: Any, vocab_size: int, source: FeatureSource | None = None, offer: FeatureOffer | None = None
    ) -> "RemoteDrafter":
        config = self._config
        self._make_channel(config.draft_key, config.draft_pool_key, 0.1)
        options = RemoteOptions(
            config.wanted,
            salt_key=salt_key(self._own),
            pools_each=config.draft_pools_each,
            first_pool=secrets.randbelow(MANY_POOLS),
        )
        hello = hello_of(config, tokenizer, vocab_size, offer)
        drafter = RemoteDrafter(hello, (), self._thread.post, options, self._channel.problem, source=source)
        self.drafter = drafter
        known_by = "" if offer is None else TargetFacts.read(config.target).digest()
        self._start_channel(drafter, lambda member, peer: DraftPool(member.label, peer, target_digest=known_by))
        self._dial()
        self.wait(optional=config.draft_optional)
        return drafter

    def _is_settled(self, pool: DraftPool) -> bool:
        """A target does without a refusing pool that it has not started."""
        return pool.ready or (pool.refusal is not None and self._supervisor is None)

    def _in_vain(self, pool: DraftPool) -> str | None:
        refused = None if pool.refusal is None else f"draft_pool: {pool.name} refused: {pool.refusal}"
        return refused or self._worker_down()


def hello_of(config: EngineConfig, tokenizer: Any, vocab_size: int, offer: FeatureOffer | None = None) -> Hello:
    digest, added = tokenizer_digest(tokenizer), added_tokens(tokenizer)
    name, can = model_name(config.target), list(TARGET_CAPABILITIES)
    return Hello(PROTOCOL_VERSION, digest, vocab_size, name, added, offer, capabilities=can)


class RemoteDrafter(PoolUser[DraftPool], Drafter):
    machine: TargetMachine

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
        """Only the step loop's thread reads `source`, which has the features that `hello` offers."""
        super().__init__(TargetMachine(hello, pools, options), post, problem, clock)
        self._source, self._offer = source, hello.features

    # -- the step loop: the Drafter protocol

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        with self._lock:
            return self.machine.propose(requests, limits.nodes, self._clock())

    def expect(self, requests: Sequence[Request]) -> None:
        with self._turn() as now:
            self.machine.expect(requests, now)

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        with self._lock:
            self.machine.verified(requests, trees)

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """The next `flush` or message tells the draft."""
        with self._lock:
            return self.machine.commit(request, tokens, self._clock())

    def gather(self) -> None:
        """Features that are due, read without the lock."""
        if self._source is None or self._offer is None:
            return
        kind = feature_type(self._offer.dtype)
        with self._lock:
            pieces = self.machine.due_features(row_bytes(self._offer.width, kind), self._clock())
        if pieces:
            found = self._source(np.concatenate([piece.slots for piece in pieces]))
            frames = frames_of(pieces, coded(found, kind), kind)
            with self._lock:
                self.machine.send_features(pieces, frames, self._clock())

    def flush(self) -> None:
        """Posts messages."""
        with self._turn():
            pass

    def pause(self, request: Request) -> None:
        with self._turn():
            self.machine.pause(request)

    def close(self, request: Request) -> None:
        with self._turn():
            self.machine.close(request)

    def pool_of(self, request: Request) -> DraftPool | None:
        with self._lock:
            session = self.machine.session(request)
            return None if session is None else session.pool

    # -- the channel's thread

    def _decoded(self, pool: DraftPool, frame: Frame) -> Callable[[float], None]:
        try:
            return partial(self.machine.receive, pool, decode_to_target(frame))
        except UnknownTypeError as error:
            return partial(self.machine.unknown, pool, error.kind)
        except WireError as error:
            return partial(self.machine.malformed, pool, str(error), about=type_of(frame))
