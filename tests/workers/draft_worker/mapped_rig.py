"""Drafts whose tokens are not the target's."""

from __future__ import annotations

from pathlib import Path

from rig import IDENTITY, SMALL, Box, Rig, loaded

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.draft_machine import DraftIdentity, DraftMachine
from pilotfish.core.drafting.draft_sessions import SessionTable
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.engine.drafts.mapped_vocabularies import MappedVocabularies
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.workers.draft import DraftWorker, Grower


class MappedRig(Rig):
    """A draft in `directory` that serves targets with the tokenizer in `target`, whose digest is `digest` here. What it
    guesses is held against `target`'s own model."""

    def __init__(self, directory: Path, target: Path, shape: LevelShape = SMALL, slots: int = 2000) -> None:
        self.now, self.directory, self.channel = 0.0, target, Box()
        pool = SlotPool(slots)
        self.table = SessionTable(pool, PrefixCache(pool))
        model, tokenizer = loaded(directory).model, load_tokenizer(directory)
        self.executor = TorchExecutor(model, slots, vocab_size=len(tokenizer))
        self.mapped = MappedVocabularies.of([target], tokenizer, model.config.vocab_size)
        (vocabulary,) = self.mapped.by_digest.values()
        self.map = vocabulary.map
        identity = DraftIdentity(IDENTITY.model, "of the draft", {}, mapped={IDENTITY.tokenizer: vocabulary})
        machine = DraftMachine(identity, self.table, shape, self.executor.context)
        grower = Grower(self.executor, self.table, shape.children)
        self.worker = DraftWorker(machine, grower, self.channel, lambda: self.now)

    def close(self) -> None:
        self.mapped.close()
