from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotfish.core.drafting.vocabulary import added_tokens, tokenizer_digest
from pilotfish.core.drafting.vocabulary_map import MappedVocabulary, VocabularyMap
from pilotfish.engine.token_table import token_table
from pilotfish.errors import InputError, ParameterError
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.threads import GrammarThreads
from pilotfish.model.loading.metadata import load_tokenizer

logger = logging.getLogger(__name__)

FIELD = "target_tokenizer"


@dataclass
class MappedVocabularies:
    by_digest: dict[str, MappedVocabulary] = field(default_factory=dict)
    grammars: list[GrammarThreads] = field(default_factory=list)

    @classmethod
    def of(cls, directories: Sequence[Path], draft: Any, vocab_size: int) -> MappedVocabularies:
        """`draft` is a tokenizer whose model has `vocab_size` embeddings. ParameterError names an unusable path."""
        made = cls()
        for directory in directories:
            target = load_tokenizer(directory)
            if (digest := tokenizer_digest(target)) == tokenizer_digest(draft):
                raise ParameterError(FIELD, str(directory), "tokenizers other than the draft's own")
            try:
                made._add(digest, target, draft, vocab_size)
            except InputError as error:
                raise ParameterError.described(FIELD, f"{FIELD}: {directory} cannot be mapped: {error}") from error
            shared = made.by_digest[digest].map.shared
            logger.info("%s: %d of its tokens can be guessed", directory, len(shared.ids))
        return made

    def _add(self, digest: str, target: Any, draft: Any, vocab_size: int) -> None:
        one = VocabularyMap(token_table(target, len(target)), token_table(draft, vocab_size))
        threads = GrammarThreads(Grammars(target, one.size, ()))
        self.grammars.append(threads)
        self.by_digest[digest] = MappedVocabulary(one, added_tokens(target), threads.pending, threads.masks)

    def close(self) -> None:
        for threads in self.grammars:
            threads.close()
