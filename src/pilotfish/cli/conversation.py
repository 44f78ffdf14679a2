"""A conversation: what was said, and the request that the next turn makes of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pilotfish.core.noise import DRAWN_SEED_BITS, sample_seed
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample, SampleDelta
from pilotfish.errors import ModelError, PromptError
from pilotfish.prompts import chat_prompt


def require_template(tokenizer: Any) -> None:
    """ModelError when the model has no chat template."""
    if not tokenizer.chat_template:
        raise ModelError("chat template: the model has none; --raw joins the turns as plain text")


@dataclass(frozen=True)
class Turn:
    """What the user said, and the model's answer as far as it came."""

    question: str
    sample: Sample


class Conversation:
    """Turns over one engine. `ask`, then `stream` the answer.

    The seed of answer i is H(seed, i), core.noise.sample_seed; i counts every answer since the start, those since
    forgotten too. So equal input gives an equal conversation, and a turn asked again another answer.
    """

    def __init__(self, engine: Engine, params: SamplingParams, *, system: str | None, raw: bool) -> None:
        """`system` goes before all turns. `raw` joins all texts by newlines, without a chat template."""
        self.engine = engine
        self.params = params
        self.seed = secrets.randbits(DRAWN_SEED_BITS) if params.seed is None else params.seed
        self.turns: list[Turn] = []
        self._system = [] if system is None else [_message("system", system)]
        self._raw = raw
        self._answers = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message, then question and answer of each turn."""
        said = [
            message
            for turn in self.turns
            for message in (_message("user", turn.question), _message("assistant", turn.sample.text))
        ]
        return [*self._system, *said]

    def ask(self, question: str) -> Sample:
        """Submit the next turn; PromptError leaves the conversation as it was."""
        prompt = self._prompt([*self.messages, _message("user", question)])
        params = replace(self.params, seed=sample_seed(self.seed, self._answers))
        (sample,) = self.engine.submit(prompt, params)
        self.turns.append(Turn(question, sample))
        self._answers += 1
        return sample

    def _prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokens, context = self._encode(messages), self.engine.model.shape.context
        if len(tokens) >= context:
            raise PromptError(
                f"conversation: it has outgrown the model's context: {len(tokens)} tokens; "
                f"{context - 1} and one to come are allowed"
            )
        return tokens

    def _encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if not self._raw:
            return chat_prompt(messages, self.engine.tokenizer)
        tokens: list[int] = self.engine.tokenizer.encode("\n".join(message["content"] for message in messages))
        return tokens

    def stream(self, sample: Sample) -> Iterator[SampleDelta]:
        """What each step adds to the answer, up to its end, or until it is aborted. EngineError where its logits are
        not finite."""
        while sample.finish_reason is None:
            yield from self.engine.step()
        if sample.error is not None:
            raise sample.error

    def undo(self) -> Turn | None:
        """Forget the last turn, which is returned; None when there is none."""
        return self.turns.pop() if self.turns else None

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
