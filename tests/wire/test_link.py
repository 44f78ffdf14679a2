"""A batch's arrays on their way to ranks."""

import socket
from contextlib import closing

import pytest

from pilotfish.wire.link import ALIGNMENT, TYPES, BatchMemory, RankLink


def test_arrays_are_in_memory_that_grows_for_both_ends() -> None:
    one, other = map(RankLink, socket.socketpair())
    with closing(one), closing(other), closing(BatchMemory()) as memory:
        one.lend([memory])
        (borrowed,) = other.borrow(1)
        with closing(borrowed):
            for rows, tokens in ((3, 5), (17, 2_000_000), (1, 0)):
                shapes = [*[[rows]] * 6, [rows, 8], [tokens]]
                for fill, place in enumerate(memory.arrays(shapes)):
                    place[...] = fill
                for fill, array in enumerate(borrowed.arrays(shapes)):
                    assert array.shape == tuple(shapes[fill]) and array.dtype == TYPES[fill]
                    assert (array == fill).all() and array.ctypes.data % ALIGNMENT == 0


def test_an_end_that_lends_nothing_has_gone() -> None:
    one, other = map(RankLink, socket.socketpair())
    with closing(other):
        one.close()
        with pytest.raises(ConnectionResetError, match="the other end of the link has gone"):
            other.borrow(2)
