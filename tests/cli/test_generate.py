"""The contract of `pilotfish generate`; what people see of it, and of paces."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runs import PLAIN, Refused
from inline_drafts import inline_drafts
from sizes import sized
from support import edit_tensors
from transformers import AutoTokenizer

from pilotfish.cli.generate import Printer, records, report
from pilotfish.config.hardware.pace import Pace
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.engine import pairs
from pilotfish.engine.engine import Engine
from pilotfish.engine.llm import Completion, RequestOutput
from pilotfish.model.pacer import Pacer
from pilotfish.prompts import BadRow, Row

STATS = {
    *("seconds", "tokens_per_second", "tokens_per_verify_step", "verify_steps", "draft_tokens", "accepted_tokens"),
    *("accepted_by_origin", "hits", "cached_by_tier", "handovers"),
}
FIXED = (*PLAIN, "--json", "--max-tokens", 8)


def test_a_row_has_the_fields_of_the_contract(generate, llama: Path) -> None:
    result = generate("--prompt", "def f(x):", "--seed", 5)
    assert (result.code, result.stderr) == (0, "")
    (row,) = result.rows
    assert set(row) == {"id", "prompt_tokens", "token_ids", "text", "finish_reason", "seed", "exact", "stats"}
    assert set(row["stats"]) == STATS
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert row["prompt_tokens"] == len(tokenizer.encode("def f(x):"))
    assert (len(row["token_ids"]), row["finish_reason"], row["seed"]) == (8, "length", 5)
    assert row["stats"]["verify_steps"] == 8 and row["stats"]["draft_tokens"] == 0


def test_the_drafts_of_mode_async_are_told_apart(
    generate, draft: Path, prompts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prompts(*({"id": i, "prompt": "x = [1, 2, 3]\nx = [1, 2,"} for i in range(2)))
    fixed = ("--prompts", path, "--seed", 3, "--max-tokens", 24)
    with inline_drafts(monkeypatch):
        result = generate(*fixed, "--mode", "async", "--draft", draft, "--draft-workers", 2, "--drafter", "lm")
    assert [row["token_ids"] for row in result.rows] == [row["token_ids"] for row in generate(*fixed).rows]
    for row in result.rows:
        origins = row["stats"]["accepted_by_origin"]
        assert origins and origins.keys() <= {"draft 0", "draft 1"}
        assert sum(origins.values()) == row["stats"]["accepted_tokens"]
        assert row["pools"].keys() == {"draft 0", "draft 1"}
        assert not {"malformed_frames", "dropped_nodes"} & {reason for pool in row["pools"].values() for reason in pool}


def test_mode_off_needs_no_draft_and_loads_none(generate, tmp_path: Path) -> None:
    result = generate("--prompt", "a", "--mode", "off", "--draft", tmp_path)
    assert result.code == 0 and result.rows[0]["stats"]["draft_tokens"] == 0


def test_samples_are_numbered_and_seeded(generate) -> None:
    rows = generate("--prompt", "a", "--n", 3, "--seed", 7).rows
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert rows[0]["seed"] == 7 and len({row["seed"] for row in rows}) == 3
    drawn = generate("--prompt", "a").rows[0]
    assert drawn["seed"] not in {row["seed"] for row in rows}
    for row in (rows[2], drawn):
        again = generate("--prompt", "a", "--seed", row["seed"]).rows[0]
        assert again["token_ids"] == row["token_ids"] and "index" not in again


def test_rows_of_a_file(generate, prompts: Callable[..., Path]) -> None:
    path = prompts({"id": "one", "prompt": "a"}, {"id": 2, "turns": ["a"], "category": "code"}, " ")
    result = generate("--prompts", path, "--seed", 1)
    assert result.code == 0 and [row["id"] for row in result.rows] == ["one", 2]
    assert result.rows[0]["token_ids"] == result.rows[1]["token_ids"]


def test_a_bad_row_harms_no_other(generate, prompts: Callable[..., Path]) -> None:
    good = {"id": "good", "prompt": "a"}
    bad: list[object] = ["{", "[]", {"prompt": "a"}, {"id": True, "prompt": "a"}, {"id": 1}, {"id": 1, "prompt": 5}]
    bad += [{"id": 1, "prompt": "a", "turns": ["a"]}, *({"id": 1, "turns": turns} for turns in ([], [5], "a"))]
    bad += [{"id": 1, "prompt": ""}, {"id": 1, "prompt": "a b " * 3000}]
    path = prompts(good, *bad, good)
    result = generate("--prompts", path, "--seed", 1)
    assert result.code == 2
    assert [row["id"] for row in result.rows] == ["good", "good"]
    lines = result.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{i}" for i in range(2, len(bad) + 2)]


def test_bytes_that_are_no_text_are_a_bad_row(generate, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"id": 1, "prompt": "\xff"}\n{"id": 2, "prompt": "a"}')
    result = generate("--prompts", path)
    assert (result.code, [row["id"] for row in result.rows]) == (2, [2])
    assert result.stderr.startswith(f"{path}:1: ") and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("template", "marks"), [("<{{ messages[0].content }}>", True), ("{{ messages[0].content }}", False)]
)
def test_a_prompt_that_goes_without_the_chat_template_is_told_of(
    generate, prompts: Callable[..., Path], llama: Path, tmp_path: Path, template: str, marks: bool
) -> None:
    chatty = Path(shutil.copytree(llama, tmp_path / "chatty"))
    (chatty / "chat_template.jinja").write_text(template)
    fixed = ("--target", chatty, "--seed", 1)
    told, raw = (generate(*fixed, "--prompt", "a", *options) for options in ([], ["--raw"]))
    line = "pilotfish: the prompt is sent as it is, without the model's chat template; `pilotfish chat` applies it, and"
    assert (told.code, told.stderr.count("\n"), told.stderr.startswith(line)) == (0, int(marks), marks)
    assert (raw.code, raw.stderr) == (0, "")
    (sent,) = told.rows
    turns = generate(*fixed, "--prompts", prompts({"id": 1, "turns": ["a"]}, {"id": 2, "prompt": "a"}))
    assert turns.stderr == "" and turns.rows[1]["token_ids"] == sent["token_ids"]
    assert turns.rows[0]["prompt_tokens"] == sent["prompt_tokens"] + 2 * marks


# -- an engine that fails: one line, exit code 1


@pytest.mark.parametrize("options", sized([("--drafter", "ngram", "--logprobs", 2)], [(), ("--drafter", "ngram")]))
def test_a_row_whose_logits_overflow_fails_alone(
    generate, prompts: Callable[..., Path], llama: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The weights are finite: their products after one token are not."""
    copy = Path(shutil.copytree(llama, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(copy)
    ((poison,),) = (tokenizer.encode(text) for text in ("#",))

    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][poison] = torch.eye(64)[0] * 1e4
        tensors["model.norm.weight"].fill_(1.0)
        tensors["lm_head.weight"][:, 0] = 6e37

    path = prompts({"id": 1, "prompt": "ab"}, {"id": 2, "prompt": "ab#"}, {"id": 3, "prompt": "cd"})
    edit_tensors(copy, overflow)
    result = generate("--target", copy, "--prompts", path, "--concurrency", 3, "--temperature", 0, *options)
    assert result.code == 1
    assert sorted(row["id"] for row in result.rows) == [1, 3]
    reason = "logits: those after token 2 are not finite (NaN or infinity); none can be sampled"
    assert result.stderr.splitlines() == [f"{path}:2: {reason}", "pilotfish: EngineError: 1 of 3 rows failed"]
    assert "NaN" not in result.stdout and "Infinity" not in result.stdout


# -- bad input: one line, exit code 2


A = ("--prompt", "a")


@pytest.mark.parametrize(
    ("named", "options"),
    [
        *(("logit_bias", [*A, "--logit-bias", "a=1"]), ("draft", [*A, "--draft", "/nowhere"])),
        *(("cache_salt", [*A, "--cache-salt", ""]), ("concurrency", [*A, "--concurrency", "0"])),
        *(("profile", [*A, "--profile", "/nowhere/at/all.json"]), ("pair", [*A, "--pair", "pycode"])),
        ("choice: it cannot be combined with --regex; give one of them", [*A, "--regex", "a", "--choice", "b"]),
        ("json_schema: 'nowhere' is not allowed; expected a file that can be", [*A, "--json-schema", "nowhere"]),
        ("structured_outputs", [*A, "--choice", ""]),
        ("Invalid value for '--temperature'", [*A, "--temperature", "warm"]),
        *(("No such option: --surprise", [*A, "--surprise"]), ("extra", [*A, "extra"]), ("prompt", [])),
        *(("prompt", [*A, "--prompts", "b"]), ("prompt", ["--prompt", ""]), ("prompt", ["--prompt", "a b " * 3000])),
        *(("prompts", ["--prompts", "/nowhere.jsonl"]), ("prompts", ["--prompts", "/"])),
        *(("prompts", ["--prompts", "/dev/null"]), ("target", [*A, "--target", "/nowhere"])),
        ("/", [*A, "--target", "/"]),
    ],
)
def test_impossible_options_prompts_and_targets(refused: Refused, llama: Path, named: str, options: list[str]) -> None:
    assert named in refused("generate", "--target", llama, *FIXED, *options)


def test_impossible_pairs(refused: Refused) -> None:
    assert refused("generate", "--prompt", "a", "--draft", "/nowhere").startswith("draft")
    assert refused("generate", "--prompt", "a", "--pair", "llama").startswith("pair")
    assert refused("generate", "--prompt", "a", "--pair", "pycode", "--draft", "/nowhere").startswith("draft")


def test_a_timeline_is_written(generate, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    assert generate("--prompt", "x = 1", "--profile", file).code == 0
    assert any(event.get("name", "").startswith("aten::") for event in json.loads(file.read_text())["traceEvents"])


def test_people_get_precision_and_memory_then_text_and_a_table(pilotfish, llama: Path) -> None:
    options = ("--max-tokens", 4, "--seed", 1, "--kv-slots", 512)
    result = pilotfish("generate", "--target", llama, *PLAIN, "--prompt", "a", *options)
    assert result.code == 0 and result.stderr == ""
    dtype, memory, *_ = result.stdout.splitlines()
    assert dtype.startswith("dtype: ") and memory.startswith("memory: weights ") and "512 KV slots" in memory
    assert "tokens/s" in result.stdout and "seed 1" in result.stdout


def test_rules_and_log_probabilities(generate) -> None:
    options = ("--allowed-token-id", 65, "--allowed-token-id", 66, "--bad-token-id", 66, "--logprobs", 1)
    (row,) = generate("--prompt", "x", *options, "--prompt-logprobs", 0, "--ignore-eos").rows
    assert set(row["token_ids"]) == {65}
    assert [entry["token_id"] for entry in row["logprobs"]] == row["token_ids"]
    assert len(row["prompt_logprobs"]) == row["prompt_tokens"] - 1
    assert all(len(entry["top"]) == 1 and entry["rank"] >= 1 for entry in row["logprobs"])


def test_outputs_are_what_was_asked_for(generate, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "array", "items": {"enum": ["a", "ü"]}, "minItems": 1, "maxItems": 3}')
    grammar.write_text('start: /[ab]{2,4}/ "-" /[0-9]/')
    fixed = ("--prompt", "def f(x):", "--seed", 5, "--max-tokens", 40)
    cases: list[tuple[tuple[object, ...], Callable[[str], object]]] = [
        (("--json-schema", schema), lambda text: set(json.loads(text)) <= {"a", "ü"}),
        (("--grammar", grammar), re.compile("[ab]{2,4}-[0-9]").fullmatch),
        (("--regex", "[x-z]{3}"), re.compile("[x-z]{3}").fullmatch),
        (("--choice", "yes", "--choice", "no"), {"yes", "no"}.__contains__),
    ]
    for options, check in cases:
        row = generate(*fixed, *options).rows[0]
        assert row["finish_reason"] == "stop" and check(row["text"])


# -- --pace; overruns are the fake's: no test depends on the speed of its machine


BOTH = "target=1.5ms,draft=500us"


@pytest.fixture
def overruns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What every paced engine reports: overruns of the target and of the draft in 200 forwards each."""
    counts = [0, 0]
    paces = {"target": Pace.parse("1.5ms"), "draft": Pace.parse("500us")}

    def pacing(engine: Engine) -> list[Pacer]:
        pacers = [Pacer(role, paces[role], 200, n) for role, n in zip(paces, counts, strict=True)]
        return pacers if engine.config.pace else []

    monkeypatch.setattr(Engine, "pacing", pacing)
    return counts


def test_too_many_overruns_are_told_on_stderr(generate, overruns: list[int]) -> None:
    overruns[:] = [2, 3]
    result = generate("--prompt", "a", "--pace", BOTH)
    assert result.code == 0 and len(result.rows) == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("pilotfish: warning: ") and line.endswith("draft 500us, overruns 3 of 200")


def test_people_see_what_is_paced(pilotfish, llama: Path, overruns: list[int]) -> None:
    overruns[:] = [1, 0]
    fixed = ("--target", llama, *PLAIN, "--max-tokens", 2, "--prompt", "a")
    assert "paced" not in pilotfish("generate", *fixed).stdout
    last = pilotfish("generate", *fixed, "--pace", BOTH).stdout.splitlines()[-1]
    assert last == "paced: target 1.5ms, overruns 1 of 200; draft 500us, overruns 0 of 200"


def test_the_demo_is_paced(
    pilotfish, llama: Path, draft: Path, overruns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first table of two. An engine of mode async reports the target alone."""
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    monkeypatch.setattr(
        "pilotfish.engine.engine.make_budget", lambda config, *_: FixedBudget(config.nodes, config.levels)
    )
    overruns[1] = 50
    with inline_drafts(monkeypatch):
        shown = pilotfish("demo", "--pair", "pycode", *PLAIN, "--max-tokens", 3, "--rounds", 1, "--pace", BOTH)
    text = shown.stdout
    assert text.count("guessed by the draft, accepted") == text.count("the demo took ") == 1 and "\x1b[" not in text
    for words in ("tokens per verify step", "accepted at depth 1", "guessed by draft 0", "6 of 6 outputs equal"):
        assert text.count(words) == 2
    assert text.count("async is ") + text.count("no verdict: ") == 2
    assert "target 1.5ms, overruns 0 of 200; off and sync draft" in " ".join(text.split())
    assert "draft 500us, overruns 50 of 200" in shown.stderr
    assert pilotfish("demo", "--pace", "target=1").code == 2


# -- what people see: on a terminal nothing that it would obey, in a pipe the text as it is


TEXT = "one\x1b[2J\x07\n\ttwo \u202e日本語"
TOLD: dict[str, Any] = {"seconds": 1.0, "tokens_per_second": 3.0, "draft_tokens": 8, "accepted_tokens": 3}
TOLD |= {"accepted_by_origin": {"draft 0": 2, "ngram": 1}, "tokens_per_verify_step": 1.5}


def shown_to(capfd: pytest.CaptureFixture[str], row_id: str = "row") -> str:
    row = Row(row_id, ("a",), chat=False, place="file:1")
    printer = Printer(json=False)
    output = Completion(0, [5, 6, 7], TEXT, "length", 7, TOLD, None)
    for record in records(row, RequestOutput([1], [output], None), {}, exact=True):
        printer.output(record)
    printer.end([])
    return capfd.readouterr().out


def test_a_terminal_is_given_no_commands(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = shown_to(capfd)
    assert "one\\x1b[2J\\x07\n" in out and "two \\u202e日本語" in out
    assert "\x1b[2J" not in out and "\u202e" not in out and "\x07" not in out


def test_a_pipe_is_given_the_text_and_who_guessed_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = shown_to(capfd)
    assert f"\n{TEXT}\n" in out and "3 of 8" in out and "accepted, guessed by: draft 0 2, ngram 1\n" in out


def test_ids_of_rows_are_escaped_and_no_markup(capfd: pytest.CaptureFixture[str]) -> None:
    out = shown_to(capfd, row_id="\x1b]0;owned\x07")
    assert r"\x1b]0;owned\x07 · seed 7" in out and "\x1b]" not in out
    assert shown_to(capfd, row_id="[/x] [red]y").count("[/x] [red]y") == 2  # above its text, and in the table


def test_a_bad_row_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    report(BadRow("file\x1b[2J:1", "the template refuses: \x07\n  forged\x9b"))
    assert capfd.readouterr().err == "file\\x1b[2J:1: the template refuses: \\x07 forged\\x9b\n"
