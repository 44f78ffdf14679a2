"""Segments over NIXL (an optional extra), whose agents read other processes' and hosts' memory, over RDMA if possible.

A read may see any moment, and a failed transfer may have written anything: so the epoch is read after the segment,
every wait has a deadline, and memory that a transfer may still write to is used for nothing else. Nothing of NIXL's
that unpickles is used, nor its notifications."""

import importlib.util
import logging
import secrets
import time
from contextlib import suppress
from typing import Any

import numpy as np

from pilotfish.core.peers.fields import MAX_FRAME
from pilotfish.core.prefilling.prefill_messages import RemoteMemory
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.errors import EngineError, SegmentError
from pilotfish.kv.arena import Arena, ArenaPlan, Bytes, check_content, check_epoch

DEADLINE = 2.0  # seconds that a transfer may take
#: Seconds between two looks at a transfer.
PAUSE = 20e-6
EPOCH_BYTES = 8
#: Readers that were closed while a transfer was on its way, which may still write to their memory.
_unfinished: "list[NixlReader]" = []


def nixl_installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


class NixlOffer:
    """Lets agents that know its metadata read an arena; NIXL asks for no key."""

    def __init__(self, arena: Arena) -> None:
        try:
            self._agent = _new_agent(answers=True)
            self._registered = _register(self._agent, arena.memory)
            metadata = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's are of many classes
            raise EngineError(f"nixl: {error}") from error
        self._arena = arena  # its memory stays where it is
        self.memory = RemoteMemory(metadata, arena.memory.ctypes.data, arena.memory.nbytes)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlReader:
    transport = "nixl"

    def __init__(self, memory: RemoteMemory) -> None:
        """Takes up to some seconds. OSError or ValueError where that memory cannot be read from here."""
        self._address = memory.address
        self._pending: Any = None  # a transfer that may still be on its way
        self._lost: str | None = None  # why
        try:
            self._agent = _new_agent(answers=False)
            self._peer = self._agent.add_remote_agent(memory.agent)
            head = self._staging(ArenaPlan.HEAD_BYTES)
            self._transfer(0, head)
            self._plan = ArenaPlan.read(head.tobytes())
            if self._plan.size != memory.size or self._plan.place_bytes > MAX_FRAME:
                raise ValueError("this is no memory for segments")
            self._epoch, self._data = self._staging(EPOCH_BYTES), self._staging(self._plan.place_bytes)
        except ValueError:
            raise
        except Exception as error:  # NIXL's are of many classes
            raise OSError(f"nixl: {error}") from error

    def read(self, reference: SegmentReference) -> Bytes:
        """As SharedMemoryReader's; SegmentError also where it cannot be had in time."""
        self._plan.check(reference)
        data = self._data[: reference.size]
        self._transfer(self._plan.place_at(reference.place), data)
        self._transfer(self._plan.epoch_at(reference.place), self._epoch)
        check_epoch(reference, int(self._epoch.view(np.uint64)[0]))
        check_content(reference, data.data)
        return data

    def close(self) -> None:
        if self._busy():
            _unfinished.append(self)
            return
        with suppress(Exception):  # the worker may be gone
            self._agent.remove_remote_agent(self._peer)

    def _staging(self, size: int) -> Bytes:
        memory = np.zeros(size, np.uint8)
        _register(self._agent, memory)
        return memory

    def _transfer(self, first: int, into: Bytes) -> None:
        """Copy from byte `first` of the arena on. SegmentError if that fails or takes too long."""
        deadline = time.monotonic() + DEADLINE
        if self._lost is not None:
            raise SegmentError("gone", self._lost)
        if self._busy():
            raise SegmentError("late", "an earlier transfer over NIXL has not ended")
        here, there = (self._described(address, len(into)) for address in (into.ctypes.data, self._address + first))
        try:
            self._pending = self._agent.initialize_xfer("READ", here, there, self._peer)
            state = self._agent.transfer(self._pending)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(PAUSE)
                state = self._agent.check_xfer_state(self._pending)
        except Exception as error:  # NIXL's are of many classes, and end a transfer
            state, self._lost = "ERR", f"NIXL has lost the worker: {error}"
        if state == "PROC":
            raise SegmentError("late", f"not there after {DEADLINE:g} s over NIXL")
        self._release()
        if state != "DONE":
            self._lost = self._lost or "NIXL has lost the worker"
            raise SegmentError("gone", self._lost)

    def _described(self, address: int, size: int) -> Any:
        return self._agent.get_xfer_descs([(address, size, 0)], mem_type="DRAM")

    def _busy(self) -> bool:
        if self._pending is None:
            return False
        with suppress(Exception):  # an error is an end
            if self._agent.check_xfer_state(self._pending) == "PROC":
                return True
        self._release()
        return False

    def _release(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            with suppress(Exception):
                self._agent.release_xfer_handle(pending)


def _new_agent(answers: bool) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout
    config = nixl_agent_config(enable_prog_thread=answers, backends=["UCX"])
    return nixl_agent(f"pilotfish-{secrets.token_hex(16)}", config)


def _register(agent: Any, memory: Bytes) -> Any:
    return agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], mem_type="DRAM")
