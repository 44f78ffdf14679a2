"""What the server needs of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.wire.serving import Delta, Status, StepReport


class Update(Protocol):
    """What was added to one output of a request; several steps of it where the reader is slow."""

    @property
    def delta(self) -> Delta: ...
    @property
    def steps(self) -> tuple[StepReport, ...]: ...


class Stream(Protocol):
    """The updates of a request; it ends once all outputs have finished."""

    def __aiter__(self) -> Stream: ...
    async def __anext__(self) -> Update:
        """InputError: the target refuses the request; TargetUnavailable: it died; EngineError: a step broke."""
        ...

    def abort(self) -> None:
        """Idempotent, never blocks."""
        ...


class Health(Protocol):
    """Whether the target can serve, and what is known of it."""

    @property
    def ready(self) -> bool: ...
    @property
    def reason(self) -> str:
        """Why it is not ready, one line; "" when it is."""
        ...

    @property
    def retry_after(self) -> float:
        """Seconds after which it may be ready, where it is not."""
        ...

    @property
    def restarts(self) -> int: ...
    @property
    def status(self) -> Status | None: ...


class Engine(Protocol):
    """A target in another process."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def defaults(self) -> dict[str, Any]:
        """The model's own sampling parameters, by SamplingParams' names."""
        ...

    @property
    def health(self) -> Health: ...
    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None = None,
        max_nodes: int | None = None,
    ) -> Stream:
        """TargetUnavailable where the target is not ready."""
        ...
