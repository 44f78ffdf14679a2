"""Targets as threads of the test's process: their engines, loops and sockets are real, no interpreter starts."""

import itertools
import threading
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from support import make_engine

from pilotfish.engine.targets.members import Member
from pilotfish.engine.targets.servers import Servers
from pilotfish.engine.targets.target_process import TargetService
from pilotfish.wire.serving import WAITING
from pilotfish.wire.sockets import ListeningChannel

_numbers = itertools.count()


class InlineTarget:
    """Listens below a directory, from the beginning to `close`, which is as sudden as a process's end."""

    def __init__(self, directory: Path, model: Path, fingerprint: str = "equal", **config: Any) -> None:
        self.member = Member(f"ipc://{directory}/{next(_numbers)}", name=f"t{next(_numbers)}")
        self.engine = make_engine(model, **config)
        self.servers = Servers(ListeningChannel(self.member.endpoint, high_water=WAITING))
        self.service = TargetService(self.engine, self.servers)
        self.service._identity = replace(self.service._identity, fingerprint=fingerprint)
        self.thread = threading.Thread(target=self.service.run)
        self.servers.start()
        self.thread.start()

    def close(self) -> None:
        self.servers.close()
        self.service.stop()
        self.thread.join()
        self.engine.check()
        self.engine.close()
