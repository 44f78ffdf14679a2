"""Pairs by name: `pycode`, which ships with the package, `pycode@<N>m`, which computes the same at a larger model's
cost, and `smollm2`, a published model whose head ships with the package. Drafts of a target are a language model,
`draft`, and trained heads."""

import re
from dataclasses import dataclass
from pathlib import Path

from pilotfish.engine.pairs.directories import model_directory
from pilotfish.errors import ParameterError

BUNDLED = Path(__file__).parent
ALLOWED = "smollm2, pycode, or pycode@<N>m for a target inflated to N million parameters"
NAMES = re.compile(r"(smollm2|pycode)(?:(?<=pycode)@([1-9][0-9]{0,5})m)?")


@dataclass(frozen=True)
class PairDirs:
    target: Path
    draft: Path


def resolve_pair(name: str, draft: str | None = None) -> PairDirs:
    """`draft`: the name of one of its drafts; by default the first. An inflated target is written to the
    cache on first use."""
    if (match := NAMES.fullmatch(name)) is None:
        raise ParameterError("pair", name, ALLOWED)
    drafts = {path.parent.name: path.parent for path in sorted((BUNDLED / match[1]).glob("*/config.json"))}
    target = drafts.pop("target", None) or model_directory("pair", Path(name))
    chosen = drafts.get(next(iter(drafts)) if draft is None else draft)
    if chosen is None:
        raise ParameterError("draft", draft, f"{', '.join(drafts)}; others need --target")
    if match[2] is not None:
        from pilotfish.engine.pairs.inflate import inflated  # it needs torch

        target = inflated(target, int(match[2]))
    return PairDirs(target, chosen)
