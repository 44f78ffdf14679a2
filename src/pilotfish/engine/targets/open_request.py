"""A request that has not ended, as the server knows it: what it asks for, what has come of it, who has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish.core.routing.router import Route
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets.stream import Stream
from pilotfish.wire.serving import Delta, PartialOutput, StepReport, Submit


@dataclass
class BegunOutput:
    """What has come of an output."""

    tokens: list[int] = field(default_factory=list)
    scored: int = 0  # tokens of the prompt whose log-probabilities came
    ended: bool = False

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.scored += len(delta.prompt_logprobs)
        self.ended = delta.finish is not None


class OpenRequest:
    """Outputs of one prompt."""

    def __init__(
        self,
        stream: Stream,
        place: int,
        tokens: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None,
        max_nodes: int | None,
        session: str | None,
        draft: str,
    ) -> None:
        """`place` of the prompt in its stream. `params` have a seed: any target that goes on with it needs it."""
        self.stream = stream
        self.tokens = list(tokens)
        self.cache_salt = cache_salt
        self.session = session
        self.fingerprint = ""  # of the target that had it last
        self.losses = 0  # targets that ended, or were cut off, while they had it
        self.moves = 0  # targets that went on with it
        self.deadline: float | None = None  # while it waits for a target
        self.route: Route | None = None  # to the target that has it
        self.max_nodes = max_nodes
        self._place, self._params, self._draft = place, params, draft
        self._outputs = [BegunOutput() for _ in range(params.n)]

    @property
    def begun(self) -> bool:
        """Whether something of it was made, that only a target with an equal fingerprint goes on with."""
        return any(output.tokens or output.scored or output.ended for output in self._outputs)

    @property
    def ended(self) -> bool:
        return all(output.ended for output in self._outputs)

    def submit(self, number: int, incarnation: str) -> Submit:
        """For a target that is to have it: the outputs that have not ended, from where they stand."""
        partial = [
            PartialOutput(index, list(output.tokens), output.scored)
            for index, output in enumerate(self._outputs)
            if not output.ended
        ]
        resumed = partial if self.begun else None
        limits = self.cache_salt, self.max_nodes
        return Submit(number, incarnation, self.tokens, self._params, *limits, resumed, self._draft)

    def add(self, delta: Delta, step: StepReport) -> None:
        self._outputs[delta.index].add(delta)
        self.stream.add(self._place, delta, step)
