"""Draft workers for tests: real processes that start in a tenth of a second, and threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from forked import ForkedWorker
from support import SNIPPETS, VOCAB, make_engine, running

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import DraftConfig
from pilotfish.core.drafting import pools
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Hello, Load
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.drafting.vocabulary import tokenizer_digest
from pilotfish.core.peers import peer as peers
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.drafts.draft_pool import make_worker
from pilotfish.engine.engine import Engine
from pilotfish.engine.pools import remote_pools
from pilotfish.engine.processes import launch
from pilotfish.engine.processes.launch import Supervisor
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.wire.channel import Channel, ChannelThread, encode
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.workers.draft import DraftWorker

#: Prompts and parameters of 100 streams, greedy and not.
PROMPTS = [SNIPPETS[i % len(SNIPPETS)] for i in range(100)]
PARAMS = [SamplingParams(max_tokens=32, temperature=0.8 * (i % 3), seed=i, ignore_eos=True) for i in range(100)]
#: What a pool says that is alive.
LOAD = encode(Load("a draft", 0, 0, 0, 1, 1.0, 0.0))
#: Seconds after which a test gives up.
LIMIT = 20.0


# -- processes


def make_quick(patch: pytest.MonkeyPatch) -> None:
    """Workers start as forks of a process that has imported everything, and pools that fail are tried again soon."""
    patch.setattr(launch, "WorkerProcess", ForkedWorker)
    patch.setattr(remote_pools, "Supervisor", partial(Supervisor, grace=5.0))
    patch.setattr(remote_pools, "ANSWER", LIMIT)
    for module, name, seconds in ((peers, "GREETING", 0.1), (peers, "SILENCE", 0.6), (pools, "PAUSE", 0.2)):
        patch.setattr(module, name, seconds)
    for name, seconds in (("FIRST_DELAY", 0.02), ("LONGEST_DELAY", 0.05)):
        patch.setattr(launch, name, seconds)


#: Starts `pilotfish draft` for a model's directory, with further options.
Start = Callable[..., ForkedWorker]


def endpoint_in(directory: Path) -> str:
    return f"ipc://{directory}/pool"


def forked_pool(draft: Path, directory: Path, *options: str) -> ForkedWorker:
    """`pilotfish draft` at `endpoint_in(directory)`."""
    fixed = ("--dtype", "float32", "--threads", "1", "--kv-slots", "4096", "--listen", endpoint_in(directory))
    return ForkedWorker(WorkerSpec("draft", ["", "", "", "draft", "--draft", str(draft), *fixed, *options]))


# -- threads


@contextmanager
def threaded_pool(draft: Path, channel: Channel) -> Iterator[DraftWorker]:
    """A draft worker at the other end of a channel; what it raises is raised at the end."""
    model = EngineConfig(target=draft, dtype="float32", threads=1, kv_slots=4096)
    worker = make_worker(DraftConfig(model=model, listen=""), channel)
    with running(worker.run, worker.stop):
        yield worker


@contextmanager
def engine_over(target: Path, channel: Channel, **config: object) -> Iterator[Engine]:
    """An engine whose draft is at the other end of a channel."""
    hello = Hello(PROTOCOL_VERSION, tokenizer_digest(load_tokenizer(target)), VOCAB, "target")
    channel_thread = ChannelThread(channel)
    drafter = RemoteDrafter(hello, [DraftPool("the pool", b"0")], channel_thread.post, RemoteOptions(256))
    channel_thread.start(drafter.receive, drafter.tick)
    with make_engine(target, drafter, **config) as engine:
        try:
            yield engine
        finally:
            engine.close()
            channel_thread.close()
