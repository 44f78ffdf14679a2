"""A cache for kernels, widened pairs, and drafts in other engines' formats."""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder(name: str) -> Path:
    """Below $PILOTFISH_CACHE, or the user's cache."""
    return Path(os.environ.get("PILOTFISH_CACHE") or Path.home() / ".cache" / "pilotfish") / name


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Has `make` write the path once, whole or not at all; again if its sizes have changed, as after a crash."""
    note, there = path.with_name(f"{path.name}.sizes"), path.exists()
    if there and note.exists():
        if _noted(note) == _sizes(path):
            return path
        logger.warning("cache: %s is damaged; it is made anew", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        made, sizes = Path(beside, path.name), Path(beside, note.name)
        make(made)
        sizes.write_text(json.dumps(_sizes(made)))
        if note.exists() and _noted(note) == _sizes(path):  # another process was sooner
            return path
        if path.is_dir():  # none can be moved over it
            with suppress(FileNotFoundError):
                path.rename(Path(beside, "before"))
        sizes.replace(note)
        try:
            made.replace(path)
        except OSError:
            if not path.is_dir():  # or another process was sooner, with the same
                raise
    return path


def _noted(note: Path) -> dict[str, int] | None:
    try:
        noted: dict[str, int] = json.loads(note.read_bytes())
    except ValueError:
        return None
    return noted


def _sizes(path: Path) -> dict[str, int]:
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.stat().st_size for file in files if file.is_file()}
