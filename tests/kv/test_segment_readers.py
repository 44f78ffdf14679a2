"""Segments read out of another process's memory: what was referred to, or an error that says why not."""

import fcntl
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from arenas import PLACES, SEGMENT_BYTES, Owner, expected_of, put, reason
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.kv.arena import Arena, SharedMemoryReader, content


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(PLACES * SEGMENT_BYTES, SEGMENT_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def reader(arena: Arena) -> SharedMemoryReader:
    return SharedMemoryReader(arena.offer())


def changed(reference: SegmentReference, **fields: int) -> SegmentReference:
    return msgspec.structs.replace(reference, **fields)


@pytest.mark.parametrize("size", [1, 1000, SEGMENT_BYTES])
def test_what_was_written_is_read(arena: Arena, reader: SharedMemoryReader, size: int) -> None:
    references = [put(arena, size, seed) for seed in range(PLACES // 2)]
    for seed, reference in enumerate(references):
        expected = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        assert np.array_equal(reader.read(reference), expected)


def test_what_is_read_is_a_copy(arena: Arena, reader: SharedMemoryReader) -> None:
    reference = put(arena, 100)
    data = reader.read(reference)
    before = data.copy()
    arena.buffer(reference.place)[:] = 0
    assert np.array_equal(data, before)


def test_references_to_something_else(arena: Arena, reader: SharedMemoryReader) -> None:
    reference = put(arena, 100)
    assert reason(reader, changed(reference, place=PLACES)) == "out_of_range"
    assert reason(reader, changed(reference, place=(1 << 31) - 1)) == "out_of_range"
    assert reason(reader, changed(reference, size=SEGMENT_BYTES + 1)) == "out_of_range"
    assert reason(reader, changed(reference, epoch=7)) == "stale"
    assert reason(reader, changed(reference, size=99)) == "content"
    assert reason(reader, changed(reference, content=reference.content ^ 1)) == "content"
    arena.buffer(reference.place)[17] ^= 1
    assert reason(reader, reference) == "content"
    arena.free(reference.place)
    assert reason(reader, reference) == "stale"


def test_a_place_with_the_same_again_is_stale_nevertheless(arena: Arena, reader: SharedMemoryReader) -> None:
    first = put(arena, 100)
    arena.free(first.place)
    second = put(arena, 100)
    assert (second.place, second.content) == (first.place, first.content)
    assert reason(reader, first) == "stale"
    assert len(reader.read(second)) == 100


def test_a_rewritten_place_is_stale(arena: Arena, reader: SharedMemoryReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, checks = put(arena, SEGMENT_BYTES), []
    check = SharedMemoryReader._check_epoch

    def rewrite_then_check(reader: SharedMemoryReader, reference: SegmentReference) -> None:
        checks.append(reference)
        if len(checks) == 2:
            arena.free(reference.place)
            put(arena, SEGMENT_BYTES)
        check(reader, reference)

    monkeypatch.setattr(SharedMemoryReader, "_check_epoch", rewrite_then_check)
    assert reason(reader, reference) == "stale" and len(checks) == 2


def test_an_owner_that_is_killed() -> None:
    """What it had is still readable where it was mapped, and nowhere else; another process is not taken for it."""
    owner = Owner()
    try:
        reader = SharedMemoryReader(owner.shared_memory)
        first = reader.read(owner.reference).copy()
        assert np.array_equal(first, expected_of(owner.reference))
        second = owner.rewrite()
        assert reason(reader, owner.reference) == "stale"
        assert np.array_equal(reader.read(second), expected_of(second))
    finally:
        owner.kill()
    assert np.array_equal(reader.read(second), expected_of(second))
    assert reason(reader, owner.reference) == "stale"
    with pytest.raises(FileNotFoundError):
        SharedMemoryReader(owner.shared_memory)
    reader.close()
    assert reason(reader, second) == "out_of_range"


def test_a_process_that_has_the_owners_number_is_not_the_owner(arena: Arena) -> None:
    """As after a restart, or in another container: the same process and file, another arena in it."""
    other = Arena(PLACES * SEGMENT_BYTES, SEGMENT_BYTES)
    mixed = msgspec.structs.replace(other.offer(), nonce=arena.offer().nonce)
    assert "not that memory" in refused(ValueError, SharedMemoryReader, mixed)
    other.close()


def test_files_that_are_no_arena(arena: Arena, tmp_path: Path) -> None:
    offer = arena.offer()
    ordinary = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    pipe, end = os.pipe()
    loose = os.memfd_create("loose")
    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    os.truncate(ordinary, offer.size)
    os.truncate(loose, offer.size)
    os.truncate(small, 8)
    fcntl.fcntl(small, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    cases = [(ordinary, "is no shared memory"), (pipe, "is no shared memory"), (loose, "may change its size")]
    try:
        for descriptor, message in cases:
            with pytest.raises(ValueError, match=message):
                SharedMemoryReader(msgspec.structs.replace(offer, descriptor=descriptor))
        with pytest.raises(ValueError, match="has not the size that was told"):
            SharedMemoryReader(msgspec.structs.replace(offer, size=offer.size + 1))
        with pytest.raises(ValueError, match="no memory for segments"):
            SharedMemoryReader(msgspec.structs.replace(offer, descriptor=small, size=8))
        with pytest.raises(FileNotFoundError):
            SharedMemoryReader(msgspec.structs.replace(offer, descriptor=10_000))
        with pytest.raises(FileNotFoundError):
            SharedMemoryReader(msgspec.structs.replace(offer, pid=(1 << 53) - 1))
    finally:
        for descriptor in (ordinary, pipe, end, loose, small):
            os.close(descriptor)


def test_memory_is_not_to_be_shortened_or_written_by_readers(arena: Arena) -> None:
    offer = arena.offer()
    with pytest.raises(PermissionError):
        os.truncate(offer.descriptor, 0)
    reader = SharedMemoryReader(offer)
    with pytest.raises(ValueError, match="read-only"):
        reader.memory[0] = 1


@given(data=st.binary(max_size=20_000))
def test_a_segments_checksum_is_crc32_of_its_bytes(data: bytes) -> None:
    assert content(memoryview(data)) == zlib.crc32(data)
