"""Drafts elsewhere, as an engine has them: its workers, or pools that it is told of."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from pilotfish.config import EngineConfig, model_name
from pilotfish.core.messages import PROTOCOL_VERSION, Hello
from pilotfish.core.pools import DraftPool
from pilotfish.core.target_machine import RemoteOptions
from pilotfish.core.vocabulary import added_tokens, tokenizer_digest
from pilotfish.engine.draft_workers import DraftWorkers
from pilotfish.engine.launch import WorkerState, wait_until
from pilotfish.errors import EngineError, ModelError
from pilotfish.target.remote import RemoteDrafter
from pilotfish.wire.channel import ChannelThread
from pilotfish.wire.curve_keys import load_target_keys
from pilotfish.wire.dialing import DialingChannel

logger = logging.getLogger(__name__)

#: Seconds that a worker may take to load, and a pool to answer.
LOADING, ANSWER = 600.0, 5.0
#: Starts again after which a worker that never served is given up.
MAX_RESTARTS = 3
#: Seconds after which a thread that holds the interpreter gives way: between two forwards the step loop must not wait
#: for the thread that owns the channel as long as Python's own 5 ms.
SWITCH_INTERVAL = 0.0002


def hello_of(config: EngineConfig, tokenizer: Any, vocab_size: int) -> Hello:
    """The target that `config` names, as pools compare and show it."""
    digest, added = tokenizer_digest(tokenizer), added_tokens(tokenizer)
    return Hello(PROTOCOL_VERSION, digest, vocab_size, model_name(config.target), added)


class RemoteDrafts:
    """Connects, waits until every pool serves (or, where drafts are optional, until it is clear that one does not), and
    keeps what has to be closed."""

    def __init__(self, config: EngineConfig, hello: Hello, workers: DraftWorkers | None = None) -> None:
        """Of `workers`, or of the pools that `config` names. ModelError for a pool that cannot be used, EngineError for
        a worker that does not start."""
        self._workers = workers
        self._optional = config.draft_optional
        endpoints = config.draft_pool if workers is None else workers.endpoints
        keys = load_target_keys(config.draft_key, config.draft_pool_key, len(endpoints))
        self._channel = DialingChannel(endpoints, secrets.token_bytes(8), keys, insecure=config.insecure)
        names = config.draft_pool if workers is None else workers.names
        self.pools = [DraftPool(name, str(i).encode()) for i, name in enumerate(names)]
        self._channel_thread = ChannelThread(self._channel)
        options = RemoteOptions(config.wanted)
        self.drafter = RemoteDrafter(hello, self.pools, self._channel_thread.post, options, self._channel.problem)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._channel_thread.start(self.drafter.receive, self.drafter.tick)
        try:
            self._wait_for_pools()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the pools. Idempotent."""
        self._channel_thread.close()
        sys.setswitchinterval(self._interval)

    def _wait_for_pools(self) -> None:
        for pool in self.pools:
            reason = self._wait_for(pool)
            if reason is None:
                continue
            if not self._optional:
                raise EngineError(reason) if self._crashing() else ModelError(reason)
            logger.warning("%s; the target serves without it", reason)

    def _wait_for(self, pool: DraftPool) -> str | None:
        """Why it does not serve; None once it does."""
        timeout = ANSWER if self._workers is None else LOADING
        try:
            wait_until(lambda: pool.ready, lambda: self._in_vain(pool), timeout, f"draft_pool: {pool.name}")
        except EngineError as error:
            return self._in_vain(pool) or self._channel.problem(pool.peer) or str(error)
        return None

    def _in_vain(self, pool: DraftPool) -> str | None:
        """Why waiting for it would help nothing."""
        if pool.refusal is not None:
            return f"draft_pool: {pool.name} refused: {pool.refusal}"
        down = (state for state in self._states() if state.status == "failed" or state.restarts >= MAX_RESTARTS)
        return next((state.problem for state in down if state.problem), None)

    def _states(self) -> Sequence[WorkerState]:
        return () if self._workers is None else self._workers.states()

    def _crashing(self) -> bool:
        """Whether it is the workers, not what they were given, that are to blame."""
        return self._workers is not None and all(state.status != "failed" for state in self._states())
