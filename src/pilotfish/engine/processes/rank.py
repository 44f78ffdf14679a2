from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.memory import device_of, load_configured
from pilotfish.engine.processes.process import run_worker
from pilotfish.engine.processes.ranks import LOADING, TAKING
from pilotfish.errors import InputError
from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.batch import Batch
from pilotfish.model.collective import ProcessGroup
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.shards import Shard
from pilotfish.wire.channel import encode
from pilotfish.wire.link import BatchMemory, Begin, Done, ForwardRows, Loaded, RankLink, Unusable, to_rank


def run_rank(config: EngineConfig, rank: int, path: Path) -> None:
    run_worker(f"target rank {rank}", lambda _: _serve(config, rank, path))


def _serve(config: EngineConfig, rank: int, path: Path) -> None:
    torch.set_num_threads(config.num_threads)
    device = device_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = ProcessGroup(Shard(rank, config.tensor_parallel), device)
    try:
        model = load_configured(config, config.target, config.max_model_len, group)
    except InputError as error:
        with closing(RankLink.dial(path)) as link:
            link.send(encode(Unusable(rank, str(error))), TAKING)
        raise
    with ExitStack() as stack:
        link = stack.enter_context(closing(RankLink.dial(path)))
        link.send(encode(Loaded(rank)), TAKING)
        begin = to_rank.decode(link.receive(LOADING))
        assert isinstance(begin, Begin)
        memories = [stack.enter_context(closing(memory)) for memory in link.borrow(2)]
        executor = TorchExecutor(model, begin.slots)
        group.connect(path.with_name("meeting"))
        with suppress(ConnectionError):  # rank 0 has gone
            while True:
                _run(link, executor, memories)


def _run(link: RankLink, executor: TorchExecutor, memories: Sequence[BatchMemory]) -> None:
    message = to_rank.decode(link.receive(None))
    assert isinstance(message, ForwardRows)
    ids, keep, *rows = map(torch.from_numpy, memories[message.memory].arrays(message.shapes))
    executor.run([Batch(ids, keep, message.num_kept, AttentionMetadata(*rows, longest=message.longest))])
    link.send(encode(Done()), TAKING)
