from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotfish.cli.chat_screen import Screen, screen_for
from pilotfish.cli.options import CHAT_SAMPLING, ENGINE, engine_config, with_model
from pilotfish.cli.show import started
from pilotfish.command import Given, taking
from pilotfish.core.sampling.noise import DRAWN_SEED_BITS, sample_seed
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import ModelError, PromptError
from pilotfish.prompts import chat_prompt

if TYPE_CHECKING:  # imports torch
    from pilotfish.engine.engine import Engine
    from pilotfish.engine.sample import Sample
    from pilotfish.wire.serving import Delta

ANSWER_TOKENS = 1024  # of an answer, where neither the user nor the model says
EXIT = "/exit"
HELP = """\
/undo        forget the last turn
/regenerate  forget the last answer and give another
/reset       forget all turns
/exit        leave, as Ctrl-D does
A line that ends in a backslash goes on in the next one. Ctrl-C ends an answer;
at the sign a second one leaves."""


@taking(ENGINE, CHAT_SAMPLING)
def chat(
    engine: Given,
    sampling: Given,
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="As --target.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message, before all turns.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the model continues the joined turns.")] = False,
) -> None:
    """Talk to a model. Each line is a turn; /help lists the commands. From a pipe: answers on stdout, nothing else."""
    SamplingParams(**{"max_tokens": ANSWER_TOKENS, **sampling})  # checked before a model is loaded
    config = engine_config(with_model(engine, model))
    from pilotfish.model.loading.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.model.loading.metadata import load_tokenizer

    if not raw and not load_tokenizer(config.target).chat_template:  # checked before the weights are loaded
        raise ModelError("chat template: the model has none; --raw joins the turns as plain text")
    with started(config) as loaded:
        params = loaded.sampling_params(**{"max_tokens": ANSWER_TOKENS, **loaded.model.generation.defaults, **sampling})
        converse(Conversation(loaded, params, system=system, raw=raw), screen_for(drafts=config.mode != "off"))


def converse(conversation: Conversation, screen: Screen) -> None:
    screen.greet(conversation.seed, drawn=conversation.params.seed is None)
    while True:
        try:
            text = screen.turn()
            if text is None or text.rstrip() == EXIT:
                return
            if text.startswith("/"):
                _command(text.rstrip(), conversation, screen)
            elif text.strip():
                answer(text, conversation, screen)
        except PromptError as error:
            screen.error(f"turn dropped: {error}")


def answer(question: str, conversation: Conversation, screen: Screen) -> None:
    sample = conversation.ask(question)
    with screen.answering(sample) as interrupted:
        for delta in conversation.stream(sample):
            screen.piece(delta)
            if interrupted.is_set():
                conversation.engine.abort(sample)


def _command(name: str, conversation: Conversation, screen: Screen) -> None:
    match name:
        case "/help":
            screen.note(HELP)
        case "/reset":
            conversation.turns.clear()
            screen.note("all turns are forgotten")
        case "/undo":
            screen.note("the last turn is forgotten" if conversation.undo() else "there is no turn to forget")
        case "/regenerate":
            if turn := conversation.undo():
                answer(turn.question, conversation, screen)
            else:
                screen.note("there is no answer to give again")
        case _:
            screen.error(f"{name}: there is no such command; /help lists them")


@dataclass(frozen=True)
class ChatTurn:
    question: str
    sample: Sample  # the answer as far as it came


class Conversation:
    """Seed of answer i: H(seed, i), core.noise.sample_seed; i counts all answers, so that equal input gives an equal
    conversation, but a repeated turn another answer."""

    def __init__(self, engine: Engine, params: SamplingParams, *, system: str | None, raw: bool) -> None:
        self.engine, self.params, self._raw = engine, params, raw
        self.seed = secrets.randbits(DRAWN_SEED_BITS) if params.seed is None else params.seed
        self.turns: list[ChatTurn] = []
        self._system = [] if system is None else [("system", system)]
        self._answers = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        turns = ((("user", turn.question), ("assistant", turn.sample.text)) for turn in self.turns)
        said = [*self._system, *chain.from_iterable(turns)]
        return [{"role": role, "content": text} for role, text in said]

    def ask(self, question: str) -> Sample:
        prompt = self._prompt([*self.messages, {"role": "user", "content": question}])
        params = replace(self.params, seed=sample_seed(self.seed, self._answers))
        (sample,) = self.engine.submit(prompt, params)
        self.turns.append(ChatTurn(question, sample))
        self._answers += 1
        return sample

    def _prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokenizer, joined = self.engine.tokenizer, "\n".join(message["content"] for message in messages)
        tokens: list[int] = tokenizer.encode(joined) if self._raw else chat_prompt(messages, tokenizer)
        context = self.engine.model.config.context
        if len(tokens) >= context:
            raise PromptError(
                f"conversation: it has outgrown the model's context: {len(tokens)} tokens; "
                f"{context - 1} and one to come are allowed"
            )
        return tokens

    def stream(self, sample: Sample) -> Iterator[Delta]:
        while sample.finish_reason is None:
            yield from self.engine.step()
        if sample.error is not None:
            raise sample.error

    def undo(self) -> ChatTurn | None:
        return self.turns.pop() if self.turns else None
