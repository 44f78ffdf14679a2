"""transformers' model classes import torch's compiler, FSDP and sympy for decorators and type names: half of a worker's
start. Here stand-ins replace them."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed
import transformers.utils  # noqa: F401  # before the stand-ins are there

logger = logging.getLogger(__name__)

#: Imported while the stand-ins are there: everything that any architecture needs.
_NEEDED = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.models.auto.modeling_auto")
_COMPILER = "torch._dynamo"
_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
_STAND_INS = (_COMPILER, _INDEXING, "scipy", "scipy.optimize")  # decorators; losses


def import_for_serving() -> None:
    """Comes before any other import of transformers' models. For our own processes only: others would miss what is left
    out."""
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
    __path__: list[str] = []  # noqa: RUF012  # so that it is a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _real_indexing if name == "TransformGetItemToIndex" else _unchanged


def _unchanged(decorated: Any = None, *_: Any, **__: Any) -> Any:
    return decorated if isinstance(decorated, Callable) else _unchanged  # type: ignore[arg-type]


def _real_indexing() -> Any:
    return importlib.import_module(_INDEXING).TransformGetItemToIndex()
