"""What the log says of a trained head at start where it can be used, and be of less use than its operator thinks."""

from __future__ import annotations

import logging

from pilotfish.engine.heads import ConfiguredHead
from pilotfish.heads.spec import HeadFiles

logger = logging.getLogger(__name__)


def note_head(head: ConfiguredHead, files: HeadFiles, context: int) -> None:
    """A warning where it names another target as the one that it was trained on, which is no error: the heads of base
    models guess for those that were tuned from them, too. And a line where it knows fewer positions than the `context`
    of its target."""
    if (doubt := files.trained_on.doubt(head.target)) is not None:
        logger.warning("head: %s was trained on %s: its guesses may seldom be right", head.directory, doubt)
    if files.spec.context < context:
        text = "head: %s guesses up to position %d of the target's %d; what comes after is decoded without it"
        logger.info(text, head.directory, files.spec.context, context)
