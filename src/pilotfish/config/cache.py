"""Where what is made once is kept: kernels, widened pairs, drafts in the formats of other engines."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Below $PILOTFISH_CACHE, or the user's cache."""
    return Path(os.environ.get("PILOTFISH_CACHE") or Path.home() / ".cache" / "pilotfish") / name
