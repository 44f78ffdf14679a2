"""Real processes that start in a tenth of a second: forks of one that has imported everything."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from pilotfish.cli import main
from pilotfish.engine.processes.process import Ending, WorkerSpec

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        *("slim_imports", "pytest", "support", "pilotfish.engine.drafts.draft_pool"),
        *(
            "pilotfish.engine.prefills.prefill_pool",
            "pilotfish.cli.workers",
            "transformers.models.llama.modeling_llama",
        ),
    ]
)


@cache
def _warm() -> None:
    """Until all is imported: nobody's patience with a worker counts that."""
    process = _server.Process(target=int)
    process.start()
    process.join()


class ForkedWorker:
    """Stands in for `engine.process.WorkerProcess`: the same command in a process that need not import torch again."""

    def __init__(self, spec: WorkerSpec) -> None:
        _warm()
        self._process = _server.Process(target=_work, args=(list(spec.command)[3:], spec.cores), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def wait(self) -> None:
        multiprocessing.connection.wait([self._process.sentinel])

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> Ending:
        self._process.kill()
        self._process.join()
        return Ending(self._process.exitcode or 0, "")

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def forked(work: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """A process of its own for a function of a module."""
    _warm()
    process = _server.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def _work(arguments: list[str], cores: frozenset[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs are started with it ignored
    if cores:
        os.sched_setaffinity(0, cores)
    sys.exit(main(arguments))
