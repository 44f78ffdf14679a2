"""The outputs of a job as they grow: what every format says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish.core.logprobs import TokenLogprobs
from pilotfish.server.answers import PromptTokensDetails, Usage
from pilotfish.server.job import Growth, Plan
from pilotfish.server.prompts import Prompt
from pilotfish.wire.serving import Delta, Finish, Verified


@dataclass
class Output:
    """One output of one prompt. `text`, `token_ids`, `logprobs` and `offsets` are what the client has not been sent."""

    index: int
    prompt: Prompt
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # characters of the whole output's text before each token
    begun: bool = False  # the client has been sent something
    tokens: int = 0
    end: int = 0  # characters of the whole output's text
    seed: int | None = None
    finish: Finish | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)

    def grow(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.tokens
        self.logprobs += delta.logprobs
        if delta.ends:
            self.offsets += (self.end, *delta.ends[:-1])
            self.end = delta.ends[-1]
        self.tokens += len(delta.tokens)
        self.seed = delta.seed if self.seed is None else self.seed
        self.finish = delta.finish or self.finish
        self.prompt_logprobs += delta.prompt_logprobs
        self.verified += delta.verified

    def sent(self) -> None:
        self.begun = True
        self.text.clear()
        self.token_ids.clear()
        self.logprobs.clear()
        self.offsets.clear()

    @property
    def reason(self) -> str | None:
        return None if self.finish is None else self.finish.reason

    @property
    def stop(self) -> str | int | None:
        return None if self.finish is None else self.finish.stop

    @property
    def started(self) -> bool:
        """Not while the engine scores a prompt, part by part: the first event tells of all of it."""
        return self.tokens > 0 or self.finish is not None

    @property
    def news(self) -> bool:
        """Whether there is something to send: tokens can end within a character, or where a stop string may begin."""
        return not self.begun or self.finish is not None or bool(self.logprobs) or any(self.text)


class Outputs:
    """All outputs of a plan, in the client's order."""

    def __init__(self, plan: Plan) -> None:
        self._n = plan.params.n
        self._prompts = plan.prompts
        self.all = [Output(i, plan.prompts[i // self._n]) for i in range(plan.outputs)]

    def grow(self, growth: Growth) -> Output:
        """The output that grew."""
        output = self.all[growth.index]
        output.grow(growth.delta)
        return output

    def prompt_logprobs(self, output: Output) -> Sequence[TokenLogprobs]:
        """The engine scores a prompt once, for the first of its outputs, which it also begins first."""
        return self.all[output.index // self._n * self._n].prompt_logprobs

    @property
    def usage(self) -> Usage:
        prompts = sum(len(prompt.tokens) for prompt in self._prompts)
        completions = sum(output.tokens for output in self.all)
        return Usage(prompts, completions, prompts + completions, cached())


def cached() -> PromptTokensDetails:
    """Prompt tokens whose KV was there already: none is kept across requests."""
    return PromptTokensDetails(0)
