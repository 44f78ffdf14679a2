"""Source files as training text: collected, split with whole packages held out, and encoded.

A document is one `.py` file, named by its path below the source it came from (`asyncio/tasks.py`).
Tests and generated tables are left out of the standard library: they would teach the models
assertions and code pages instead of code.
"""

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from pilotfish.errors import ParameterError

Tokens = npt.NDArray[np.uint16]

STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "turtledemo"}
)
FALLBACK_HELD_OUT = 20  # one document in this many, where no named package is among the sources


@dataclass(frozen=True)
class Document:
    """One source file: its path below its source, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Split:
    """Documents to train on, and documents that training never sees."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]


def collect(sources: Sequence[Path]) -> list[Document]:
    """Every readable, distinct `.py` document of the sources, sorted; no sources: the standard library."""
    if not sources:
        root = Path(sysconfig.get_path("stdlib"))
        return _distinct(_documents(root, lambda name: STDLIB_EXCLUDED.isdisjoint(name.parts)))
    return _distinct(document for source in sources for document in _documents(source, lambda _: True))


def split(documents: Iterable[Document], held_out: Sequence[str]) -> Split:
    """Hold out the named packages, or a twentieth of the documents where none of them is there."""
    documents = tuple(documents)
    chosen = {document.name for document in documents if _belongs(document, held_out)}
    if not chosen:
        ranked = sorted(documents, key=lambda document: _digest(document.name))
        chosen = {document.name for document in ranked[: -(-len(ranked) // FALLBACK_HELD_OUT)]}
    training = tuple(document for document in documents if document.name not in chosen)
    if not training:
        raise ParameterError("source", f"{len(documents)} documents", "two or more distinct .py files")
    return Split(training, tuple(document for document in documents if document.name in chosen))


def encode(documents: Sequence[Document], encode_batch: Callable[[list[str]], list[list[int]]], end: int) -> Tokens:
    """All documents' token ids in one row, `end` after each: [tokens] uint16."""
    rows = encode_batch([document.text for document in documents])
    return np.concatenate([np.array([*row, end], dtype=np.uint16) for row in rows])


def _documents(source: Path, wanted: Callable[[PurePosixPath], bool]) -> Iterable[Document]:
    if not source.exists():
        raise ParameterError("source", str(source), "an existing file or directory")
    paths = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    root = source if source.is_dir() else source.parent
    for path in paths:
        name = PurePosixPath(path.relative_to(root).as_posix())
        text = _text(path) if wanted(name) else None
        if text is not None:
            yield Document(str(name), text)


def _text(path: Path) -> str | None:
    """The file's text, or None where it is not UTF-8 text worth reading."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.replace("\r\n", "\n") if text.strip() and "\0" not in text else None


def _distinct(documents: Iterable[Document]) -> list[Document]:
    by_digest: dict[str, Document] = {}
    for document in documents:
        by_digest.setdefault(_digest(document.text), document)
    return sorted(by_digest.values(), key=lambda document: document.name)


def _belongs(document: Document, packages: Sequence[str]) -> bool:
    """Whether the document is part of a package, or tests it: `test_email.py` belongs to `email`."""
    parts = PurePosixPath(document.name).with_suffix("").parts
    return any(part == name or part.startswith(f"test_{name}") for part in parts for name in packages)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
