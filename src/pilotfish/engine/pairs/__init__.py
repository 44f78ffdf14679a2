"""The bundled pair by name: `pycode`, and `pycode@<N>m`, which computes the same at a larger model's cost. Its target
has several drafts: a language model, `draft`, and trained heads."""

import re
from dataclasses import dataclass
from pathlib import Path

from pilotfish.errors import ParameterError

BUNDLED = Path(__file__).parent
ALLOWED = "pycode, or pycode@<N>m for a target inflated to N million parameters"


@dataclass(frozen=True)
class PairDirs:
    target: Path
    draft: Path


def resolve_pair(name: str, draft: str = "draft") -> PairDirs:
    """An inflated target is written to the cache on first use."""
    match = re.fullmatch(r"(pycode)(?:@([1-9][0-9]{0,5})m)?", name)
    if match is None:
        raise ParameterError("pair", name, ALLOWED)
    folder = BUNDLED / match[1]
    drafts = {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}
    target = drafts.pop("target")
    if draft not in drafts:
        raise ParameterError("draft", draft, f"{', '.join(drafts)}; others need --target")
    if match[2] is not None:
        from pilotfish.engine.pairs.inflate import inflated  # it needs torch

        target = inflated(target, int(match[2]))
    return PairDirs(target, drafts[draft])
