"""Libraries that speak to people: made silent, and what they raise made one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet() -> Iterator[None]:
    """transformers logs nothing and shows no progress meanwhile: its reports have many lines."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def log_through_root() -> None:
    """transformers' lines go the way of all others, in place of a handler of its own on stderr."""
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def one_line(error: BaseException) -> str:
    """The first line of what a library says, and the second where the first only announces it."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]
