"""What is refused says why in one line."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], call: Callable[..., object], *given: Any, **options: Any) -> str:
    """The line with which a call is refused."""
    with pytest.raises(error) as caught:
        call(*given, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line
