"""Imports no torch."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_text
from pilotfish.engine.processes.launch import POLL, Supervisor, WorkerState, wait_until
from pilotfish.engine.processes.placement import equal_parts
from pilotfish.engine.processes.process import WorkerSpec, command_of
from pilotfish.errors import ModelError, ParameterError, RankLost
from pilotfish.wire.channel import encode
from pilotfish.wire.link import BatchMemory, Begin, ForwardRows, RankLink, Unusable, from_rank

if TYPE_CHECKING:
    from pilotfish.model.batch import Batch

logger = logging.getLogger(__name__)

#: Seconds that ranks may take to load, to take a forward's rows, and to be found dead after a forward failed.
LOADING, TAKING, NOTICING = 600.0, 30.0, 2.0


class Ranks:
    """Rank 0 is this process. A rank that ends takes all with it: none is restarted alone."""

    def __init__(self, config: EngineConfig, cores: frozenset[int]) -> None:
        """`cores` are divided among all ranks. ParameterError for a device of one rank alone."""
        if config.device not in ("cpu", "cuda"):
            raise ParameterError("device", config.device, "cpu or cuda with tensor_parallel")
        self.cores, *others = equal_parts(cores, config.tensor_parallel)
        self._others = len(others)
        self._lost: str | None = None
        self._links: list[RankLink] = []
        self._forwards = 0
        self._open = ExitStack()
        self._memories = [BatchMemory(), BatchMemory()]
        for memory in self._memories:
            self._open.callback(memory.close)
        self._supervisor = Supervisor(changed=self._changed)
        self.meeting = self._supervisor.directory / "meeting"  # where all ranks connect to each other
        self._listener = self._open.enter_context(socket.socket(socket.AF_UNIX))
        path = self._supervisor.directory / "ranks"
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._supervisor.start(
            [
                WorkerSpec(f"target rank {rank}", rank_command(config, rank, path), own, restarts=False)
                for rank, own in enumerate(others, 1)
            ]
        )

    def _changed(self, state: WorkerState) -> None:
        if state.status == "failed":
            self._lost = self._lost or state.problem

    def begin(self, slots: int) -> None:
        """Waits until all have loaded. EngineError for a rank that does not come, ModelError for one that refuses the
        model."""
        wait_until(lambda: self._admitted() == self._others, lambda: self._lost, LOADING, "target ranks")
        for link in self._links:
            link.send(encode(Begin(slots)), TAKING)
            link.lend(self._memories)

    def _admitted(self) -> int:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return len(self._links)
        link = RankLink(connection)
        self._open.callback(link.close)
        message = from_rank.decode(link.receive(TAKING))
        if isinstance(message, Unusable):
            raise ModelError(f"target rank {message.rank}: {message.reason}")
        self._links.append(link)
        return len(self._links)

    @contextmanager
    def together(self, batch: "Batch") -> Iterator[None]:
        """The others run this batch meanwhile. RankLost if one does not, and from then on: their place in it is
        unknown."""
        self.refuse_lost()
        try:
            frame = self._written(batch)
            for link in self._links:
                link.send(frame, TAKING)
            yield
            self._forwards += 1
            if self._forwards > 1:
                for link in self._links:  # they have read the batch before, whose memory is written to next
                    from_rank.decode(link.receive(TAKING))
        except BaseException as error:
            self._note(error)
            if isinstance(error, OSError | RuntimeError):
                self.refuse_lost()
            raise

    def _written(self, batch: "Batch") -> bytes:
        """The frame that says where."""
        which, tensors = self._forwards % 2, batch.tensors()
        shapes = [[*tensor.shape] for tensor in tensors]
        for place, tensor in zip(self._memories[which].arrays(shapes), tensors, strict=True):
            place[...] = tensor.numpy()
        return encode(ForwardRows(which, shapes, batch.num_kept, batch.metadata.longest))

    def refuse_lost(self) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)

    def _note(self, error: BaseException) -> None:
        deadline = time.monotonic() + NOTICING
        while self._lost is None and isinstance(error, OSError | RuntimeError) and time.monotonic() < deadline:
            time.sleep(POLL)
        reason = f"{type(error).__name__}: {error}"
        self._lost = self._lost or f"target ranks are out of step after a forward that failed: {reason}"

    def close(self) -> None:
        self._supervisor.close()  # first: without it their ends would look like failures
        self._open.close()


def rank_command(config: EngineConfig, rank: int, path: Path) -> list[str]:
    return command_of("rank", config=config_text(config.of_rank(rank)), rank=rank, connect=path)
