"""What all routes share: the engine, the configuration, the gate, and what follows from them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

from pilotfish.config import ServerConfig
from pilotfish.errors import TargetUnavailable
from pilotfish.server.engine import Engine
from pilotfish.server.failures import HttpError, short
from pilotfish.server.gate import Gate
from pilotfish.server.pieces import Pieces
from pilotfish.wire.serving import Identity


@dataclass
class Service:
    """One target as the routes see it."""

    engine: Engine
    config: ServerConfig
    gate: Gate
    started: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def version(self) -> str:
        return version("pilotfish")

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.engine.tokenizer)

    @property
    def identity(self) -> Identity:
        """TargetUnavailable before the target was ready once."""
        health = self.engine.health
        if health.status is None:
            raise TargetUnavailable(health.reason, health.retry_after)
        return health.status.identity

    @property
    def names(self) -> tuple[str, ...]:
        """What the model is called; the first one is what answers say."""
        return self.config.served_model_name or (self.identity.model,)

    @cached_property
    def longest_token(self) -> int:
        """Characters."""
        return max(map(len, self.engine.tokenizer.get_vocab()))

    def refuse_long(self, field: str, texts: Iterable[str]) -> None:
        """HttpError for a text that has too many characters for the context, whatever its tokens are: to tokenize it
        would take long, and others would wait."""
        context = self.identity.context
        for text in texts:
            if len(text) > context * self.longest_token:
                message = f"{field}: {len(text)} characters are more than the context's {context} tokens can be"
                raise HttpError(400, message, param=field, code="context_length_exceeded")

    def name(self, asked: str | None) -> str:
        """The name to answer with. HttpError 404 for a model that is not served; None asks for the one that is."""
        if asked is not None and asked not in self.names:
            message = f"model: {short(asked)} is not served; expected {' or '.join(self.names)}"
            raise HttpError(404, message, param="model", code="model_not_found")
        return asked or self.names[0]

    @property
    def fingerprint(self) -> str:
        """Equal for equal model, version and dtype, on which outputs depend."""
        identity = self.identity
        text = f"{identity.model}\n{identity.dtype}\n{self.version}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]
