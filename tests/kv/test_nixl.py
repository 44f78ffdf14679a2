"""Segments over NIXL, between processes: what was referred to, or an error. Where NIXL is installed."""

import os
import signal
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from arenas import PLACES, SEGMENT_BYTES, Owner, expected_of, reason

from pilotfish.core.prefilling.prefill_messages import RemoteMemory
from pilotfish.errors import SegmentError
from pilotfish.kv import nixl
from pilotfish.kv.nixl import NixlReader, nixl_installed

pytestmark = pytest.mark.skipif(not nixl_installed(), reason="NIXL is not installed: pip install 'pilotfish[nixl]'")


@pytest.fixture(params=["all", "tcp"])
def owner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    """With what UCX chooses within a host, and with its emulation over TCP."""
    monkeypatch.setenv("UCX_TLS", request.param)
    owner = Owner("nixl")
    yield owner
    owner.kill()


def memory_of(owner: Owner) -> RemoteMemory:
    assert owner.remote_memory is not None
    return owner.remote_memory


def over_tcp() -> bool:
    return os.environ["UCX_TLS"] == "tcp"


def test_segments_of_another_process(owner: Owner) -> None:
    """Bit for bit; what is stale, out of range or damaged is refused; an owner that is killed is gone."""
    reader, first = NixlReader(memory_of(owner)), owner.reference
    data = reader.read(first).copy()
    assert np.array_equal(data, expected_of(first))
    second = owner.rewrite()
    assert np.array_equal(data, expected_of(first))
    assert reason(reader, first) == "stale"
    assert np.array_equal(reader.read(second), expected_of(second))
    assert reason(reader, msgspec.structs.replace(second, place=PLACES)) == "out_of_range"
    assert reason(reader, msgspec.structs.replace(second, size=SEGMENT_BYTES + 1)) == "out_of_range"
    assert reason(reader, msgspec.structs.replace(second, size=SEGMENT_BYTES - 1)) == "content"
    owner.kill()
    assert reason(reader, second) == "gone"
    assert reason(reader, second) == "gone"
    with pytest.raises(OSError, match=r"^nixl: "):
        NixlReader(memory_of(owner))
    reader.close()


def test_an_owner_that_stands_still(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read ends in time. Memory that the transfer may still write to is not used before it has ended."""
    reader = NixlReader(memory_of(owner))
    monkeypatch.setattr(nixl, "DEADLINE", 0.2)
    owner.process.send_signal(signal.SIGSTOP)
    try:
        outcome = "read" if np.array_equal(reader.read(owner.reference), expected_of(owner.reference)) else "wrong"
    except SegmentError as error:
        outcome = error.reason
        assert reason(reader, owner.reference) == "late"
    if over_tcp():
        assert outcome == "late"
    assert outcome in ("read", "late")  # within a host the kernel copies without the owner
    owner.process.send_signal(signal.SIGCONT)
    monkeypatch.setattr(nixl, "DEADLINE", 10.0)
    while reader._busy():
        pass
    assert np.array_equal(reader.read(owner.reference), expected_of(owner.reference))
    reader.close()


def test_memory_that_is_no_arena(owner: Owner) -> None:
    memory = memory_of(owner)
    with pytest.raises(OSError, match=r"^nixl: "):
        NixlReader(msgspec.structs.replace(memory, agent=b"nothing"))
    with pytest.raises(OSError, match=r"^nixl: "):
        NixlReader(msgspec.structs.replace(memory, address=memory.address + memory.size))
    with pytest.raises(ValueError, match="no memory for segments"):
        NixlReader(msgspec.structs.replace(memory, address=memory.address + 32))
    with pytest.raises(ValueError, match="no memory for segments"):
        NixlReader(msgspec.structs.replace(memory, size=memory.size - 1))


def test_a_reader_closed_in_the_midst(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_unfinished", [])
    reader = NixlReader(memory_of(owner))
    monkeypatch.setattr(nixl, "DEADLINE", 0.2)
    owner.process.send_signal(signal.SIGSTOP)
    try:
        reader.read(owner.reference)
        late = False
    except SegmentError as error:
        late = error.reason == "late"
    reader.close()
    assert late or not over_tcp()
    assert nixl._unfinished == [reader] * late
    owner.process.send_signal(signal.SIGCONT)
