"""How much a test does: in the suite enough to find what it looks for, in `make soak` all of it."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

#: Set in the processes in which the soak runs files of the suite.
WHOLE = "PILOTFISH_WHOLE_TESTS"
T = TypeVar("T")


def sized(suite: T, soak: T) -> T:
    """A number of examples, steps or tokens, or which cases there are."""
    return soak if os.environ.get(WHOLE) else suite


#: For tests that are slow by nature, beside quicker ones of the same kind.
in_soak = pytest.mark.skipif(not os.environ.get(WHOLE), reason="make soak runs it")
