from contextlib import closing
from pathlib import Path

import numpy as np
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
from pilotfish.wire.link import Begin, ForwardRows, Loaded, RankLink, Unusable, to_rank

#: Types of a batch's tensors: token ids and kept rows, then the metadata.
_TYPES = (np.int64, np.int64, *[np.int32] * 6)


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
    with closing(RankLink.dial(path)) as link:
        link.send(encode(Loaded(rank)), TAKING)
        begin = to_rank.decode(link.receive(LOADING))
        assert isinstance(begin, Begin)
        executor = TorchExecutor(model, begin.slots)
        group.connect(path.with_name("meeting"))
        _run(link, executor)


def _run(link: RankLink, executor: TorchExecutor) -> None:
    while True:
        try:
            frame = link.receive(None)
        except ConnectionError:
            return
        message = to_rank.decode(frame)
        assert isinstance(message, ForwardRows)
        executor.run([batch_of(message)])


def batch_of(message: ForwardRows) -> Batch:
    arrays = [
        torch.from_numpy(np.frombuffer(bytearray(array.data), kind).reshape(array.shape))
        for array, kind in zip(message.arrays, _TYPES, strict=True)
    ]
    return Batch(arrays[0], arrays[1], message.num_kept, AttentionMetadata(*arrays[2:], longest=message.longest))
