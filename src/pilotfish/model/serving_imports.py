"""Imports of a process that serves models and does nothing else.

With its model classes transformers imports torch's compiler, FSDP, tensor sharding and sympy: decorators and type names
of what training and its own server do. They are half of a worker's start and a quarter of its memory. Here they are
imported by nobody: while transformers is imported, stand-ins answer for them.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

#: What is imported while the stand-ins are there: all that every architecture needs.
_NEEDED = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.models.auto.modeling_auto")
_COMPILER = "torch._dynamo"
_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
_STAND_INS = (_COMPILER, _INDEXING, "scipy", "scipy.optimize")  # decorators; losses


def import_for_serving() -> None:
    """Import transformers' model classes in half of the time, before anything else does. For processes of our own:
    others in the same process would miss what was left out. A transformers that cannot be imported so is imported whole
    by whoever needs it."""
    if "transformers.modeling_utils" in sys.modules:
        return
    before = set(sys.modules)
    try:
        with _stand_ins():
            for name in _NEEDED:
                importlib.import_module(name)
    except Exception as error:
        logger.debug("transformers is imported whole: %s", error)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "transformers":
                del sys.modules[name]


@contextmanager
def _stand_ins() -> Iterator[None]:
    import torch.distributed

    import pilotfish.model  # noqa: F401  # whether torchao is there is asked once, and before all else

    absent = {name: _StandIn(name) for name in _STAND_INS if name not in sys.modules}
    is_available = torch.distributed.is_available
    sys.modules.update(absent)
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        for name in absent:
            del sys.modules[name]


class _StandIn(ModuleType):
    """A package of decorators, and of one class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # so that it is a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _real_indexing if name == "TransformGetItemToIndex" else _unchanged


def _unchanged(decorated: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return decorated if isinstance(decorated, Callable) else _unchanged  # type: ignore[arg-type]


def _real_indexing() -> Any:
    """The class of that name, once somebody needs an instance."""
    return importlib.import_module(_INDEXING).TransformGetItemToIndex()
