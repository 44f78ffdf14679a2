"""A draft's view of the targets that connect: identity, capabilities and delay."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Hello
from pilotfish.core.drafting.vocabulary import clash
from pilotfish.core.drafting.vocabulary_map import MappedVocabulary, Unshared
from pilotfish.core.features.feature_frames import FeatureNeed
from pilotfish.core.peers.peer import EchoClock, ErrorReports, GreetedTarget


@dataclass(frozen=True)
class DraftIdentity:
    model: str
    tokenizer: str  # digest of the base vocabulary
    added_tokens: Mapping[int, str]  # by their ids
    revision: str = ""  # as its operator names it
    mapped: Mapping[str, MappedVocabulary] = field(default_factory=dict)  # other vocabularies, by their digests

    def mismatch(self, hello: Hello, need: FeatureNeed | None) -> str | None:
        if not hello.oldest <= PROTOCOL_VERSION <= hello.version:
            versions = str(hello.version) if hello.oldest >= hello.version else f"{hello.oldest} to {hello.version}"
            return f"protocol version {versions}; this draft speaks {PROTOCOL_VERSION}"
        if hello.tokenizer not in (self.tokenizer, *self.mapped):
            known = f"its tokenizer {hello.tokenizer[:12]} is not that of the draft {self.model}"
            return f"{known}, nor one that its operator has named with --target-tokenizer"
        if need is not None and (reason := need.mismatch(hello.features)) is not None:
            return reason
        return clash(hello.added_tokens, self._added_tokens(hello))

    def vocabulary(self, hello: Hello) -> MappedVocabulary | None:
        return self.mapped.get(hello.tokenizer)

    def _added_tokens(self, hello: Hello) -> Mapping[int, str]:
        vocabulary = self.vocabulary(hello)
        return self.added_tokens if vocabulary is None else vocabulary.added_tokens

    def unshared(self, hello: Hello) -> Unshared:
        lacking = self._added_tokens(hello).keys() - hello.added_tokens.keys()
        return Unshared(np.array(sorted(lacking), np.int64), hello.vocab_size)


@dataclass
class ConnectedTarget(GreetedTarget):
    unshared: Unshared
    capabilities: frozenset[str]
    vocabulary: MappedVocabulary | None = None  # the draft's own
    rows: int = 0  # grown for it
    cached: int = 0  # tokens of its sessions whose KV was there
    last_features: int = 0  # the number of the last frame of features
    feature_drops: Counter[str] = field(default_factory=Counter)  # by reason
    echo: EchoClock = field(default_factory=EchoClock)
    reports: ErrorReports = field(default_factory=ErrorReports)
    errors: int = 0  # frames of this draft's that it says were of no use

    def greeted(self, hello: Hello, now: float) -> None:
        self.heard, self.capabilities = now, frozenset(hello.capabilities)
        self.echo.hear(hello.echo, now)
