"""How much a test does: in the suite enough to find what it looks for, in `make soak` all of it."""

import os
from collections.abc import Sequence
from itertools import product
from typing import TypeVar

import pytest

#: Set in the processes in which the soak runs files of the suite.
WHOLE = "PILOTFISH_WHOLE_TESTS"
T = TypeVar("T")
U = TypeVar("U")


def sized(suite: T, soak: T) -> T:
    """A number of examples, steps or tokens, or which cases there are."""
    return soak if os.environ.get(WHOLE) else suite


def paired(many: Sequence[T], few: Sequence[U]) -> list[tuple[T, U]]:
    """Each of `many` with one of `few`, in turn; in the soak with each."""
    return sized([(one, few[i % len(few)]) for i, one in enumerate(many)], list(product(many, few)))


#: For tests that are slow by nature, beside quicker ones of the same kind.
in_soak = pytest.mark.skipif(not os.environ.get(WHOLE), reason="make soak runs it")
