"""What the log says of a draft at start where it can be used, and be of less use than its operator thinks."""

from __future__ import annotations

import logging
from pathlib import Path

from pilotfish.engine.heads import ConfiguredHead
from pilotfish.model.heads.spec import HeadFiles
from pilotfish.model.loading.configuration import load_config

logger = logging.getLogger(__name__)


def note_head(head: ConfiguredHead, files: HeadFiles, context: int) -> None:
    """A warning where it names another target as the one that it was trained on, which is no error: the heads of base
    models guess for those that were tuned from them, too. And a line as of any draft."""
    if (doubt := files.trained_on.doubt(head.target)) is not None:
        logger.warning("head: %s was trained on %s: its guesses may seldom be right", head.directory, doubt)
    _note_reach("head", head.directory, files.spec.head.context, context)


def note_model(draft: Path, context: int) -> None:
    """A line where a draft model knows fewer positions than the `context` of its target."""
    _note_reach("draft", draft, load_config(draft).context, context)


def _note_reach(kind: str, draft: Path, reach: int, context: int) -> None:
    if reach < context:
        text = "%s: %s guesses up to position %d of the target's %d; what comes after is decoded without it"
        logger.info(text, kind, draft, reach, context)
