from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import DrafterKind
from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter, NoDrafter
from pilotfish.core.drafting.messages import FeatureOffer
from pilotfish.core.drafting.vocabulary import added_tokens
from pilotfish.core.scheduling.executor import Executor
from pilotfish.engine.checks import load_draft_tokenizer
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
from pilotfish.engine.heads import note_reach, sharing
from pilotfish.engine.memory import load_configured
from pilotfish.engine.trial import on_kernels
from pilotfish.grammar.threads import GrammarThreads
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.spec import HeadFiles
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.pacer import Pacer
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.workers.lm import LMDrafter
from pilotfish.workers.ngram import NgramDrafter
from pilotfish.workers.suffix import ResponseCache, SuffixDrafter


@dataclass(eq=False, repr=False)
class Drafters:
    config: EngineConfig
    target: TorchExecutor
    tokenizer: Any
    grammars: GrammarThreads
    remote: RemoteDrafts | None
    head: HeadFiles | None  # until its executor is made
    pacer: Callable[[], Pacer | None]
    draft_executor: TorchExecutor = field(init=False)  # of a draft model in this process, if there is one

    def make(self, kinds: Sequence[DrafterKind], width: int = 0) -> Drafter:
        if not kinds:
            return NoDrafter()
        config = self.config
        makers: dict[DrafterKind, Callable[[], Drafter]] = {
            "lm": partial(self.make_lm, width) if config.mode == "sync" else self._make_remote,
            "ngram": lambda: NgramDrafter(config.ngram_max, config.ngram_min),
            "suffix": lambda: SuffixDrafter(ResponseCache(config.max_cached_tokens)),
        }
        drafters = [makers[kind]() for kind in kinds]
        return drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)

    def make_lm(self, width: int = 0, children: int = 4) -> LMDrafter:
        """Levels have `width` rows (0: as configured), each with `children`. All drafters of one engine write into the
        same slots: while one has sessions, or a prefix cache, it is the only one in use."""
        return self._lm_drafter(width or self.config.width, children)

    @cached_property
    def _lm_drafter(self) -> Callable[[int, int], LMDrafter]:
        load = self._load_head if self._drafts_with_head else self._load_draft
        executor, unshared = load()
        return partial(
            LMDrafter,
            executor,
            unshared=unshared,
            pacer=self.pacer(),
            prefix_cache=self.config.prefix_cache,
            grammars=self.grammars.pending,
            masks=self.grammars.masks,
            reads_target=self._drafts_with_head,
        )

    @property
    def _drafts_with_head(self) -> bool:
        return self.config.draft is not None and self.config.draft == self.config.features

    def _load_draft(self) -> tuple[Executor, frozenset[int]]:
        draft, slots, vocab_size = self.config.draft, self.target.num_slots, self.target.vocab_size
        assert draft is not None  # EngineConfig checks it
        tokenizer = self._read_draft(draft)
        unshared = added_tokens(tokenizer).keys() - added_tokens(self.tokenizer).keys()
        self.draft_executor, _ = on_kernels(
            self.config,
            "the draft",
            lambda own: TorchExecutor(load_configured(own, draft), slots, vocab_size=vocab_size),
        )
        return self.draft_executor, frozenset(unshared)

    def _read_draft(self, draft: Path) -> Any:
        note_reach("draft", draft, load_config(draft).context, self.target.context)
        return load_draft_tokenizer(draft, self.config.target, self.tokenizer)

    def _load_head(self) -> tuple[Executor, frozenset[int]]:
        assert self.head is not None  # as in mode sync
        model, slots = self.target.model, self.target.num_slots
        files = sharing(self.head, model)
        self.head = None
        setup = HeadSetup(model.device, model.dtype, slots, self.config.eager, self.target.vocab_size)
        executor, _ = on_kernels(self.config, "the draft", lambda own: files.executor(replace(setup, eager=own.eager)))
        executor.read_from(self.target.feature_plane)
        return executor, frozenset()

    def _make_remote(self) -> RemoteDrafter:
        config = self.config
        if config.draft is not None and config.starts_drafts and not self._drafts_with_head:
            self._read_draft(config.draft)
        assert self.remote is not None  # as in every mode async
        vocab_size, tap = self.target.vocab_size, self.target.tap
        if tap is None:
            return self.remote.connect(self.tokenizer, vocab_size)
        offer = FeatureOffer(tap.digest, tap.width, config.feature_dtype)
        return self.remote.connect(self.tokenizer, vocab_size, self.target.features, offer)
