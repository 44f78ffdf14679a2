from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_objects import Clock, store_in

from pilotfish.kv.disk import DiskStore


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(directory: Path, clock: Clock) -> Iterator[DiskStore]:
    store = store_in(directory, clock=clock)
    yield store
    store.close()
