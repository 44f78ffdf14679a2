"""An object is what it was made from, or not intact; a file gives back the object that was written into it, or says
what is wrong."""

import errno
import os
import resource
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_objects import FILE_BYTES, FORMAT, OBJECT_BYTES, OTHER_SHAPE, SHAPE, equal, failing, flip, some_kv
from sizes import sized
from support import descriptors

from pilotfish.kv.objects import Damage, KVObject, ObjectFormat

KV = some_kv()


def test_an_object_is_intact_for_its_tokens_alone() -> None:
    assert KV.intact(KV.tokens) and KV.intact(KV.tokens.tolist())
    assert not KV.intact(KV.tokens[:-1]) and not KV.intact([*KV.tokens.tolist()[:-1], 5]) and not KV.intact([])


def test_the_checksum_is_crc32_of_key_tokens_and_data() -> None:
    assert KV.checksum == zlib.crc32(KV.key + KV.tokens.astype("<u4").tobytes() + KV.data.tobytes())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    FORMAT.write(tmp_path / "object.kv", KV)
    return tmp_path / "object.kv"


def test_what_is_written_is_read(path: Path) -> None:
    assert equal(FORMAT.read(path, KV.key), KV)
    assert path.stat().st_size == FILE_BYTES and path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_the_bytes_are_as_documented(path: Path) -> None:
    contents = path.read_bytes()
    fields = b"PFISHKV\n" + struct.pack("<IIQ", 1, 64, OBJECT_BYTES) + SHAPE + KV.key + struct.pack("<I", KV.checksum)
    assert contents[:92] == fields and contents[92:96] == struct.pack("<I", zlib.crc32(fields))
    assert contents[96:352] == KV.tokens.astype("<u4").tobytes() and contents[352:] == KV.data.tobytes()


@settings(max_examples=sized(40, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bit=st.integers(0, 8 * FILE_BYTES - 1))
def test_any_bit_that_flips_is_damage(path: Path, bit: int) -> None:
    FORMAT.write(path, KV)
    flip(path, bit)
    assert FORMAT.read(path, KV.key) is (Damage.HEADER if bit < 8 * 96 else Damage.CHECKSUM)


@pytest.mark.parametrize("size", [0, 1, 95, 96, 351, 352, FILE_BYTES - 1, FILE_BYTES + 1])
def test_another_size_is_damage(path: Path, size: int) -> None:
    os.truncate(path, size)
    assert FORMAT.read(path, KV.key) is Damage.SIZE


def test_a_file_that_shrinks_while_it_is_read_is_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_readv, reads = os.readv, list[int]()

    def readv(descriptor: int, buffers: list[memoryview]) -> int:
        if reads:
            os.truncate(path, 500)
        reads.append(true_readv(descriptor, [buffers[0][:400]]))
        return reads[-1]

    monkeypatch.setattr(os, "readv", readv)
    assert FORMAT.read(path, KV.key) is Damage.SIZE
    assert reads == [400, 100, 0]


def test_what_goes_in_pieces_is_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_readv, true_write = os.readv, os.write
    monkeypatch.setattr(os, "readv", lambda descriptor, buffers: true_readv(descriptor, [buffers[0][:7]]))
    assert equal(FORMAT.read(path, KV.key), KV)
    monkeypatch.setattr(os, "write", lambda descriptor, data: true_write(descriptor, data[:33]))
    FORMAT.write(path, some_kv(1))
    assert equal(FORMAT.read(path, some_kv(1).key), some_kv(1))


def test_another_shape_key_or_size_of_object_is_damage(path: Path) -> None:
    assert ObjectFormat(OTHER_SHAPE, OBJECT_BYTES).read(path, KV.key) is Damage.SHAPE
    assert FORMAT.read(path, some_kv(1).key) is Damage.KEY
    assert ObjectFormat(SHAPE, OBJECT_BYTES - 1).read(path, KV.key) is Damage.SIZE


@pytest.mark.parametrize("field", ["magic", "version", "tokens", "object bytes"])
def test_another_format_is_damage(path: Path, field: str) -> None:
    at = {"magic": 0, "version": 8, "tokens": 12, "object bytes": 16}[field]
    contents = bytearray(path.read_bytes())
    contents[at] += 1
    contents[92:96] = struct.pack("<I", zlib.crc32(contents[:92]))
    path.write_bytes(contents)
    assert FORMAT.read(path, KV.key) is Damage.HEADER


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, make_socket, lambda path: path.symlink_to("object.kv"), lambda p: p.symlink_to(p)]
)
def test_what_is_no_file_is_damage_and_hangs_nobody(path: Path, make: Callable[[Path], None]) -> None:
    make(path.with_name("other.kv"))
    assert FORMAT.read(path.with_name("other.kv"), KV.key) is Damage.KIND


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FORMAT.read(tmp_path / "object.kv", KV.key)


@pytest.mark.parametrize("limit", [0, 50, 352, FILE_BYTES - 1])
def test_a_write_that_the_system_cuts_short_leaves_nothing(tmp_path: Path, limit: int) -> None:
    """Really: files of this process may not grow beyond a limit for a moment (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            FORMAT.write(tmp_path / "object.kv", KV)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", failing(errno.EIO))
    with pytest.raises(OSError):
        FORMAT.write(path, some_kv(1))
    monkeypatch.undo()
    assert list(path.parent.iterdir()) == [path]
    assert equal(FORMAT.read(path, KV.key), KV)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_nothing_is_written_into_what_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "object.tmp")
    with pytest.raises(OSError):
        FORMAT.write(tmp_path / "object.kv", KV)
    assert list(tmp_path.iterdir()) == []
    FORMAT.write(tmp_path / "object.kv", KV)


def test_descriptors_are_closed(path: Path) -> None:
    before = descriptors()
    for key in (KV.key, some_kv(1).key):
        FORMAT.read(path, key)
    path.with_name("other.kv").mkdir()
    FORMAT.read(path.with_name("other.kv"), KV.key)
    with pytest.raises(OSError):
        FORMAT.write(path.with_name("other.kv"), KV)
    assert descriptors() == before


def test_objects_without_data_alignment_are_read(tmp_path: Path) -> None:
    odd, kv = ObjectFormat(SHAPE, 13), some_kv(2, 13)
    odd.write(tmp_path / "object.kv", kv)
    found = odd.read(tmp_path / "object.kv", kv.key)
    assert isinstance(found, KVObject) and equal(found, kv)
    assert found.data.flags.c_contiguous and found.tokens.dtype == np.uint32
