"""Training text: documents, the tokenizer, batches; data of a user's own."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sizes import sized
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pilotfish.errors import InputError, ParameterError
from pilotfish.train.recipes import TaughtRecipe
from pilotfish.train.text.data import END_OF_TEXT, EXCLUDED, Document, Windows, collect, encode, split
from pilotfish.train.text.passages import Passages, passages_of


def test_held_out_packages_and_their_tests_are_absent_from_training(sources: Path) -> None:
    training, held_out = split(collect([sources], ()), ("beta",))
    assert not any("beta" in document.name or "beta" in document.text for document in training)
    assert {document.name for document in held_out} >= {"beta/m0.py", "test_beta.py"}
    assert {document.name for document in training} >= {"alpha/m0.py", "gamma.py"}


def test_standard_library_and_packages_are_the_default_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the suite of a library that stands for the real one."""
    if sized(True, False):
        for name in ("asyncio/tasks.py", "argparse.py", *(f"{excluded}/a.py" for excluded in EXCLUDED)):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"# {name}")
        monkeypatch.setattr(sysconfig, "get_path", lambda _: tmp_path)
    documents = collect((), ("starlette",))
    training, held_out = split(documents, ("asyncio", "email"))
    assert "asyncio/tasks.py" in {document.name for document in held_out}
    assert {"argparse.py", "middleware/sessions.py"} <= {document.name for document in training}
    names = {part for document in documents for part in Path(document.name).parts}
    assert not names & EXCLUDED
    assert not any(document.name.startswith("asyncio/") for document in training)


def test_without_a_named_package_a_twentieth_is_held_out() -> None:
    documents = [Document(f"{number}.py", str(number)) for number in range(40)]
    training, held_out = split(documents, ("absent",))
    assert len(held_out) == 2
    assert (training, held_out) == split(documents, ("absent",))


def test_unreadable_and_repeated_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_bytes(b"\xff\xfe")
    (tmp_path / "d.py").write_text("\n")
    (tmp_path / "e.txt").write_text("x = 2\n")
    assert [document.name for document in collect([tmp_path], ())] == ["a.py"]


def test_sources_and_packages_that_are_none_are_refused(tmp_path: Path) -> None:
    for documents in ([], [Document("a.py", "x")]):
        with pytest.raises(ParameterError, match="source"):
            split(documents, ())
    with pytest.raises(ParameterError, match="source"):
        collect([tmp_path / "absent"], ())
    for name in ("no_such_package", "starlette.routing", "../x", "this"):
        with pytest.raises(ParameterError, match="package"):
            collect((), (name,))


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Without the end token, which `encode` adds."""
    *ids, end = encode([Document("a", text)], tokenizer).tolist()
    assert end == 0
    return ids


def test_every_document_ends_in_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    row = encode([Document("a", "x = 1"), Document("b", "y")], tokenizer)
    assert row.dtype == np.uint16
    assert row.tolist() == [*_ids(tokenizer, "x = 1"), 0, *_ids(tokenizer, "y"), 0]


def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("def f(x):\n        return x\n", "tab\té 漢字 🐟\r\n", "  a  b ", ""):
        assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_end_of_text_is_token_0_and_nothing_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(END_OF_TEXT) == 0
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer("def")["input_ids"] == _ids(tokenizer, "def")
    assert 257 < len(tokenizer) <= 300


def test_a_prompt_that_ends_in_a_line_break_ends_on_a_token_boundary(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, rest = "def f(x):\n", "    return x\n"
    whole, first, second = (_ids(tokenizer, text) for text in (prompt + rest, prompt, rest))
    assert whole == first + second


def test_saved_tokenizer_loads_and_renders_messages(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "a = 1"}, {"role": "assistant", "content": "b = 2"}]
    for loaded in (PreTrainedTokenizerFast.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.apply_chat_template(messages, tokenize=False) == "a = 1\nb = 2"
        assert loaded("x = a + 1\n")["input_ids"] == tokenizer("x = a + 1\n")["input_ids"]


def _windows(tokens: int = 1000, seed: int = 3) -> Windows:
    return Windows(np.arange(tokens, dtype=np.uint16), rows=2, length=10, context=500, seed=seed)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    first, again, other = _windows().batch(7), _windows().batch(7), _windows(seed=4).batch(7)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.positions, again.positions)
    assert not torch.equal(first.tokens, other.tokens)


def test_targets_are_the_inputs_one_further() -> None:
    batch = _windows().batch(0)
    assert batch.tokens.shape == (2, 11) and batch.positions.shape == (2, 10)
    assert torch.equal(batch.tokens[:, 1:], batch.tokens[:, :-1] + 1)


def test_an_epoch_visits_every_window_once() -> None:
    windows = _windows(tokens=110)  # ten windows: five steps
    starts = [int(row[0]) for step in range(5) for row in windows.batch(step).tokens]
    assert len({start // 10 for start in starts}) == 10
    assert len({start % 10 for start in starts}) == 1


def test_shortest_text_has_a_window() -> None:
    for step in range(50):
        assert _windows(tokens=20).batch(step).tokens.shape == (2, 11)


def test_some_rows_jump_once_and_stay_within_the_context() -> None:
    jumps = []
    for step in range(200):
        positions = _windows().batch(step).positions
        assert positions[:, 0].eq(0).all() and positions.max() < 500
        jumps += ((positions.diff(dim=1) != 1).sum(1)).tolist()
    assert set(jumps) == {0, 1}
    assert 0.15 < np.mean(jumps) < 0.35


# -- data of a user's own: every field that a line may have, and what is refused


def read(lines: list[dict[str, Any]], tokenizer: Any, folder: Path) -> tuple[Passages, Passages]:
    path = folder / "data.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    return passages_of(TaughtRecipe(target=folder, data=(path,)), tokenizer)


def whole(passages: tuple[Passages, Passages], tokenizer: Any) -> list[str]:
    return sorted(text for part in passages for text in tokenizer.decode(part.text).split("<|endoftext|>") if text)


def open_ones(passages: tuple[Passages, Passages], tokenizer: Any) -> list[str]:
    return sorted(tokenizer.decode(prompt) for part in passages for prompt in part.prompts)


def test_every_field(tokenizer: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    lines: list[dict[str, Any]] = [
        *({"text": "x = 1", "id": 7}, {"tokens": tokenizer.encode("y = 2")}, {"prompt": "def f", "response": "(x)"}),
        *({"messages": [*chat, {"role": "assistant", "content": "d"}]}, {"conversations": chat[:2]}),
        *({"prompt": "import"}, {"turns": ["one", "two"]}, {"messages": chat}),
    ]
    passages = read(lines, tokenizer, tmp_path)
    assert whole(passages, tokenizer) == ["a\nb\ncd", "ab", "def f(x)", "x = 1", "y = 2"]
    assert open_ones(passages, tokenizer) == ["a\nb\nc", "import", "one\ntwo"]


def test_a_twentieth_is_held_out_whatever_the_file_is_called(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "email").mkdir()
    training, held_out = read([{"text": f"x = {n}"} for n in range(40)], tokenizer, tmp_path / "email")
    assert [(part.text == 0).sum() for part in (training, held_out)] == [38, 2]


def test_sources_go_beside_data(tokenizer: Any, sources: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "def a"}\n{"prompt": "def b"}\n')
    recipe = TaughtRecipe(target=tmp_path, data=(tmp_path / "data.jsonl",), sources=(sources,), held_out=("beta",))
    training, held_out = passages_of(recipe, tokenizer)
    assert len(training.prompts) == len(held_out.prompts) == 1
    assert "alpha_0_0" in tokenizer.decode(training.text) and "beta" in tokenizer.decode(held_out.text)


FINE = '{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((FINE + "{\n", "data.jsonl:2: "), (FINE + "[]", "object"), (FINE + '{"id": 3}', "one of text, tokens")),
        *((FINE + '{"text": "a", "prompt": "b"}', "['text', 'prompt']"), (FINE + '{"text": 3}', "$.text")),
        (FINE + '{"messages": [{"role": "user"}]}', "content"),
        *((FINE + '{"tokens": [5, 999]}', "999 is not allowed; expected ids below"), (FINE, "two")),
        *(('{"text": ""}', "no text"), ("", "no text"), (None, "data.jsonl")),
    ],
)
def test_what_is_no_data_is_refused(text: str | None, told: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as refused:
        passages_of(TaughtRecipe(target=tmp_path, data=(path,)), tokenizer)
    assert told in str(refused.value) and "\n" not in str(refused.value)
