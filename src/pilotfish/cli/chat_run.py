"""The loop of `pilotfish chat`: read a turn, stream the answer."""

from __future__ import annotations

import sys
from typing import Any

from pilotfish.cli.chat_screen import PlainScreen, Screen, TerminalScreen
from pilotfish.cli.conversation import Conversation, require_template
from pilotfish.cli.start import started
from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.errors import PromptError
from pilotfish.model.metadata import load_tokenizer

EXIT = "/exit"
HELP = """\
/undo        forget the last turn
/regenerate  forget the last answer and give another
/reset       forget all turns
/exit        leave, as Ctrl-D does
A line that ends in a backslash goes on in the next one. Ctrl-C ends an answer."""


def run_chat(
    config: EngineConfig, defaults: dict[str, Any], given: dict[str, Any], *, system: str | None, raw: bool
) -> None:
    """Load the models and converse to the end of the input. Parameters are `given`, else the model's own, else
    `defaults`."""
    if not raw:
        require_template(load_tokenizer(config.target))  # before the weights are loaded
    engine = started(config)
    params = SamplingParams(**{**defaults, **engine.model.generation.defaults, **given})
    with engine:
        converse(Conversation(engine, params, system=system, raw=raw), _screen(engine))


def _screen(engine: Engine) -> Screen:
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalScreen(drafts=engine.config.mode != "off")
    return PlainScreen()


def converse(conversation: Conversation, screen: Screen) -> None:
    """Turn by turn, until the input ends. What cannot be served is one line, and changes nothing."""
    screen.greet(conversation)
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
    """Stream the answer as far as it comes, which is what the conversation keeps."""
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
            conversation.reset()
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
