"""Conversations: what the model is given, what a person and a pipe see."""

import builtins
import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_runs import PLAIN
from support import CONTEXT, assert_idle, make_engine

from pilotfish.cli import chat as chat_module
from pilotfish.cli import chat_screen
from pilotfish.cli.chat import Conversation, converse
from pilotfish.cli.chat_screen import PlainScreen, TerminalScreen
from pilotfish.cli.show import OriginStream
from pilotfish.core.sampling.noise import sample_seed
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.printable import printable_output
from pilotfish.wire.serving import Delta

TEMPLATE = (
    "{% for m in messages %}{% if 'forbidden' in m.content %}{{ raise_exception('it is\\n forbidden') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
Type = Callable[..., None]


@pytest.fixture(scope="module")
def chatty(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    directory = tmp_path_factory.mktemp("chatty")
    shutil.copytree(llama, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def engine(chatty: Path) -> Engine:
    return make_engine(chatty)


@pytest.fixture(scope="module")
def drafted(chatty: Path, draft: Path) -> Engine:
    return make_engine(chatty, draft=draft, mode="sync")


def conversation(engine: Engine, system: str | None = None, *, raw: bool = False, **params: Any) -> Conversation:
    given = {"temperature": 0.8, "seed": 5, "max_tokens": 12, **params}
    return Conversation(engine, SamplingParams(**given), system=system, raw=raw)


def ask(conversation: Conversation, question: str) -> Sample:
    sample = conversation.ask(question)
    for _ in conversation.stream(sample):
        pass
    return sample


def given_to(sample: Sample, engine: Engine) -> str:
    """The text that the model continues."""
    return str(engine.tokenizer.decode(sample.request.tokens[: sample.request.num_prompt_tokens]))


# -- what was said


def test_all_that_was_said_goes_through_the_template(engine: Engine) -> None:
    talk = conversation(engine, "brief")
    first, second = ask(talk, "one"), ask(talk, "two")
    assert given_to(first, engine) == "<system>brief<user>one<assistant>"
    assert given_to(second, engine) == f"<system>brief<user>one<assistant>{first.text}<user>two<assistant>"
    assert talk.messages[-1] == {"role": "assistant", "content": second.text} and len(talk.messages) == 5


def test_raw_turns_are_joined_by_newlines(engine: Engine) -> None:
    talk = conversation(engine, "brief", raw=True)
    first, second = ask(talk, "one"), ask(talk, "two")
    assert given_to(second, engine) == f"brief\none\n{first.text}\ntwo"


def test_what_is_forgotten_is_not_said(engine: Engine) -> None:
    talk = conversation(engine, "brief")
    first, second = ask(talk, "one"), ask(talk, "two")
    undone = talk.undo()
    assert undone is not None and undone.question == "two" and talk.messages[-1]["content"] == first.text
    again = ask(talk, "two")
    assert given_to(again, engine) == given_to(second, engine) and again.token_ids != second.token_ids
    talk.turns.clear()
    assert talk.messages == [{"role": "system", "content": "brief"}] and talk.undo() is None


def test_each_answer_has_a_seed_of_its_own(engine: Engine) -> None:
    talk = conversation(engine)
    seeds = [ask(talk, "same").request.seed for _ in range(3)]
    assert seeds == [5, sample_seed(5, 1), sample_seed(5, 2)]
    drawn = [Conversation(engine, SamplingParams(), system=None, raw=True).seed for _ in range(8)]
    assert len(set(drawn)) == 8 and max(drawn) < 2**53


# -- pipes


@pytest.fixture
def chat(pilotfish: Any, chatty: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`chat(input, *options)`, float32, 12 tokens an answer; of one engine, unless options are about engines."""
    fixed = ("--target", chatty, *PLAIN, "--max-tokens", 12, "--temperature", 0.8)
    load = chat_module.started

    def run(text: str | bytes, *options: object, seed: int | None = 5) -> Any:
        data = text if isinstance(text, bytes) else text.encode()
        own = {"--target", "--kv-slots"}.intersection(map(str, options))
        monkeypatch.setattr(chat_module, "started", load if own else lambda _: nullcontext(engine))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return pilotfish("chat", *fixed, *options, *(() if seed is None else ("--seed", seed)))

    return run


def test_a_pipe_gets_answers_and_nothing_else(chat: Any, engine: Engine) -> None:
    talk = conversation(engine)
    answers = "".join(text if text.endswith("\n") else text + "\n" for text in (ask(talk, q).text for q in ("a", "b")))
    result = chat("a\n\nb")
    assert (result.code, result.stdout, result.stderr) == (0, answers, "")


def test_chat_takes_the_model_alone(
    pilotfish: Any, chatty: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "started", lambda config: nullcontext(started.append(config) or engine))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a")))
    started = list[Any]()
    assert pilotfish("chat", chatty, *PLAIN, "--max-tokens", 2).code == 0 and started[0].target == chatty
    both = pilotfish("chat", chatty, "--target", chatty, *PLAIN)
    assert both.code == 2 and "cannot be combined with MODEL" in both.stderr


@pytest.mark.parametrize(
    ("turn", "options", "named"),
    [
        (b"forbidden", (), ["chat template refuses", "it is forbidden"]),
        (b"a b " * 3000, (), ["conversation", f" tokens; {CONTEXT - 1} "]),
        (b"\xff", (), ["UTF-8"]),
        (b"a b " * 30, ("--kv-slots", 64), ["KV slots; the pool has 64"]),
    ],
)
def test_a_turn_that_fails_is_dropped(chat: Any, turn: bytes, options: tuple[object, ...], named: list[str]) -> None:
    result, without = chat(b"a\n" + turn + b"\n", *options), chat("a\n")
    assert (result.code, result.stdout) == (0, without.stdout)
    (line,) = result.stderr.splitlines()
    assert line.startswith("pilotfish: turn dropped: ") and all(word in line for word in named)


def test_commands(chat: Any) -> None:
    one, two = (chat(text).stdout for text in ("a\n", "a\nb\n"))
    assert chat("a\n/exit\nb\n").stdout == one
    for forgetting in ("/undo\n", "/undo\n/undo\n/undo\n", "/reset\n"):
        result = chat(f"a\n{forgetting}b\n")
        assert result.stdout.startswith(one) and result.stdout != two and "forg" in result.stderr
    assert chat("a\n/regenerate\n").stdout == chat("a\n/reset\na\n").stdout != one + one
    assert chat(" /exit\n").stdout, "with a space before it, it is a turn"
    helped = chat("/help\n/regenerate\n/fly me\n")
    assert (helped.code, helped.stdout) == (0, "")
    for word in ("/undo", "/reset", "/exit", "no answer to give again", "/fly me"):
        assert word in helped.stderr


def test_a_backslash_continues_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\\\nb\\\r\nc\nd\\")))
    screen = PlainScreen()
    assert [screen.turn() for _ in range(3)] == ["a\nb\nc", "d\n", None]


def test_a_seed_that_was_drawn_is_reported(chat: Any) -> None:
    drawn = chat("a\nb\n", seed=None)
    word, seed = drawn.stderr.split()
    assert word == "seed" and chat("a\nb\n", seed=int(seed)).stdout == drawn.stdout


def test_a_model_without_template_needs_raw(chat: Any, generate: Any, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    raw = chat("def f(x):\n", "--target", llama, "--raw")
    (row,) = generate("--prompt", "def f(x):", "--seed", 5, "--temperature", 0.8, "--max-tokens", 12).rows
    assert (raw.code, raw.stdout.removesuffix("\n")) == (0, row["text"].removesuffix("\n"))
    (tmp_path / "model.safetensors").unlink()
    refused = chat("a\n", "--target", tmp_path)  # before the weights are looked at
    assert (refused.code, refused.stdout) == (2, "")
    assert "chat template" in refused.stderr and "--raw" in refused.stderr and refused.stderr.count("\n") == 1


def test_the_command_line_then_the_model_say_how_long_answers_are(
    pilotfish: Any, chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(chat_module, "converse", lambda talk, _: seen.append(talk.params.max_tokens))
    shutil.copytree(chatty, tmp_path, dirs_exist_ok=True)
    options = ("chat", "--target", tmp_path, *PLAIN)
    assert pilotfish(*options).code == 0
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    assert pilotfish(*options).code == pilotfish(*options, "--max-tokens", 9).code == 0
    assert seen == [1024, 7, 9]


# -- a terminal


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Type:
    """What a person types, line by line: text, or the exception that a key raises; then Ctrl-D."""

    def lines(*entries: str | type[BaseException]) -> None:
        rest = iter(entries)

        def read(sign: str) -> str:
            assert sign in (chat_screen.SIGN, chat_screen.CONTINUED)
            entry = next(rest, EOFError)
            if isinstance(entry, str):
                return entry
            raise entry

        monkeypatch.setattr(builtins, "input", read)

    return lines


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLUMNS", "20")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.usefixtures("colours")
def test_people_see_who_wrote_and_the_cost(drafted: Engine, typed: Type, capfd: pytest.CaptureFixture[str]) -> None:
    typed("x = [1, 2,", "/help", "/fly")
    talk = conversation(drafted, max_tokens=40, stop=("\0", "e"), min_tokens=20)
    converse(talk, TerminalScreen(drafts=True))
    out = capfd.readouterr().out
    sample = talk.turns[0].sample
    assert printable_output(sample.text) in plain(out) and sample.text.count("\t") == 0
    assert f"{len(sample.token_ids)} tokens · " in out and " tokens/s · " in out and " per verify step" in out
    assert "seed 5" in out and "/regenerate" in out and "/fly: there is no such command" in plain(out)
    assert sample.request.stats.accepted_tokens and out.count("\x1b[1;32m") > 1 and "\x1b[35m" in out


def test_text_is_the_drafts_where_its_token_let_it_out(drafted: Engine) -> None:
    whole = ask(conversation(drafted, max_tokens=40), "x = [1, 2,")
    talk = conversation(drafted, max_tokens=40, stop=(whole.text[:30] + "\0",))  # 30 characters come at once
    sample = talk.ask("x = [1, 2,")
    origins = OriginStream()
    pieces = [(*origins.parts(delta), delta.text) for delta in talk.stream(sample)]
    assert pieces[0] == ("", "", "") and any(drafted for drafted, _, _ in pieces)
    assert all(drafted + own == printable_output(text) for drafted, own, text in pieces)


def test_without_colours_the_text_is_alone(drafted: Engine, typed: Type, capfd: pytest.CaptureFixture[str]) -> None:
    typed("a")
    talk = conversation(drafted)
    converse(talk, TerminalScreen(drafts=True))
    out = capfd.readouterr().out
    text = printable_output(talk.turns[0].sample.text)
    assert f"{text}\n12 tokens" in out and out.rstrip().endswith("length") and "\x1b" not in out


def test_the_first_ctrl_c_at_the_sign_warns(engine: Engine, typed: Type, capfd: pytest.CaptureFixture[str]) -> None:
    typed(KeyboardInterrupt, "a", "b\\", KeyboardInterrupt, "c", KeyboardInterrupt, KeyboardInterrupt, "not read")
    assert asked_at_a_terminal(engine) == ["a", "c"]
    assert capfd.readouterr().out.count("\nCtrl-C again leaves\n") == 3


def test_lines_that_are_no_text_are_dropped(engine: Engine, typed: Type, capfd: pytest.CaptureFixture[str]) -> None:
    typed("\udcff", "a\\", "b")
    assert asked_at_a_terminal(engine) == ["a\nb"] and "turn dropped" in capfd.readouterr().out


def asked_at_a_terminal(engine: Engine) -> list[str]:
    talk = conversation(engine)
    converse(talk, TerminalScreen(drafts=False))
    return [turn.question for turn in talk.turns]


def after(steps: int, presses: int, step: Callable[[], list[Delta]]) -> Callable[[], list[Delta]]:
    """A step after which, once, Ctrl-C is pressed so often."""
    count = iter(range(10**6))

    def stepping() -> list[Delta]:
        deltas = step()
        if next(count) == steps:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return deltas

    return stepping


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, and does so again after the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_ends_one_answer_which_stays(
    drafted: Engine, typed: Type, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = drafted
    whole = ask(conversation(engine, max_tokens=60), "one")
    monkeypatch.setattr(engine, "step", after(3, 1, engine.step))
    typed("one", "two")
    talk = conversation(engine, max_tokens=60, stop=(whole.text[:80] + "\0",))  # all text is held back till the end
    converse(talk, TerminalScreen(drafts=False))
    first, second = (turn.sample for turn in talk.turns)
    assert (first.finish_reason, second.finish_reason) == ("abort", "length")
    assert first.text and whole.text.startswith(first.text.rstrip("\ufffd")) and len(first.token_ids) < 60
    assert given_to(second, engine) == f"<user>one<assistant>{first.text}<user>two<assistant>"
    out = capfd.readouterr().out
    assert printable_output(first.text) in out and " · abort" in out
    assert_idle(engine)


@pytest.mark.usefixtures("default_sigint")
def test_a_second_ctrl_c_ends_the_program(engine: Engine, typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "step", after(1, 2, engine.step))
    typed("one")
    with pytest.raises(KeyboardInterrupt):
        converse(conversation(engine), TerminalScreen(drafts=False))
    engine.abort_all()
    assert_idle(engine)


@pytest.mark.parametrize(
    ("terminals", "kind"), [(("in", "out"), TerminalScreen), (("in",), PlainScreen), ((), PlainScreen)]
)
def test_a_terminal_at_both_ends_gets_the_sign(
    monkeypatch: pytest.MonkeyPatch, terminals: tuple[str, ...], kind: type
) -> None:
    for name in ("in", "out"):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda name=name: name in terminals, raising=False)
        monkeypatch.setattr(sys, f"std{name}", stream)
    assert isinstance(chat_screen.screen_for(drafts=True), kind)
