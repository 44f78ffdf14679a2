"""Draft workers as threads of the test's process: their models, loops and sockets are real, no interpreter starts."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from support import NoProcesses, running

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import DraftConfig
from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Guesses
from pilotfish.engine.drafts.draft_pool import make_worker
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
from pilotfish.engine.pools import remote_pools
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.wire.sockets import ListeningChannel

#: Seconds that a target waits for a tree, at most.
PATIENCE = 2.0


@contextmanager
def inline_drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines have their draft workers here, until the end. Their targets wait for trees, so that no guess depends on
    the speed of a machine."""
    with ExitStack() as workers:
        make = RemoteDrafts.__init__

        def start(drafts: RemoteDrafts, config: EngineConfig) -> None:
            make(drafts, config)
            for endpoint in () if config.draft_pool else drafts.endpoints:
                workers.enter_context(draft_worker(config, endpoint))

        monkeypatch.setattr(remote_pools, "Supervisor", NoProcesses)
        monkeypatch.setattr(RemoteDrafts, "__init__", start)
        monkeypatch.setattr(RemoteDrafter, "propose", patient_propose(RemoteDrafter.propose))
        yield


@contextmanager
def draft_worker(config: EngineConfig, endpoint: str, **options: Any) -> Iterator[None]:
    """One of an engine with a draft, until the end. `options` are of `DraftConfig`."""
    names = ("dtype", "kv_slots", "eager", "pace", "prefix_cache", "draft_layers")
    own = {name: getattr(config, name) for name in names}
    model = EngineConfig(target=config.draft, threads=1, **own)
    if config.draft == config.features:
        options["target"] = config.target
    with closing(ListeningChannel(endpoint)) as channel:
        worker = make_worker(DraftConfig(model=model, listen=endpoint, leaves=config.leaves, **options), channel)
        with running(worker.run, worker.stop):
            yield


def patient_propose(propose):  # type: ignore[no-untyped-def]
    """`propose`, again until there is a node where one may be, for PATIENCE at most."""

    def patient(drafter: RemoteDrafter, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        trees = propose(drafter, requests, limits)
        deadline = time.monotonic() + PATIENCE
        featured = drafter._source is not None
        growing = (r.max_length - len(r.tokens) > 1 and not (featured and _first_step(r)) for r in requests)
        may_grow = limits.nodes and limits.levels and any(growing)
        while may_grow and not any(map(len, trees)) and time.monotonic() < deadline:
            time.sleep(0.0005)
            trees = propose(drafter, requests, limits)
        return trees

    return patient


def _first_step(request: Request) -> bool:
    """Or the first after a preemption: a trained head has no features of it yet."""
    return request.stats.verify_steps == 0 or request.num_pending > 1
