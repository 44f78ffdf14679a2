"""Pools and workers of drafts, as a target has them."""

import os
import secrets
from typing import Any

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import model_name
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, FeatureOffer, Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.drafting.vocabulary import added_tokens, tokenizer_digest
from pilotfish.core.features.features import FeatureSource
from pilotfish.engine.memory import device_named
from pilotfish.engine.pools.remote_pools import RemotePools, salt_key
from pilotfish.engine.processes.placement import split_cores
from pilotfish.model.heads.target import TargetFacts
from pilotfish.wire.pool_users import RemoteDrafter

MANY_POOLS = 1 << 16  # more pools than a target has


class RemoteDrafts(RemotePools[DraftPool]):
    role, without, must_answer = "draft", "the target serves without it", True
    drafter: RemoteDrafter  # once `connect` has made it

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
    ) -> RemoteDrafter:
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
