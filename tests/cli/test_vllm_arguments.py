"""`pilotfish serve` in the hands of a vLLM user: the same words mean the same, or are refused by name."""

import json
import re
import shlex
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_runs import Configured, Refused, Run
from pages import codes, items, table

from pilotfish.cli.options import engine_config
from pilotfish.cli.vllm_arguments import FLAGS, Flag, translated, with_speculative_config
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import InputError
from pilotfish.server.application import apply_overrides


@pytest.fixture
def refused(refused: Refused) -> Refused:
    return partial(refused, "serve")


# -- the model


def test_a_model_is_a_word_or_an_option_or_the_bundled_pair(configured: Configured, llama: Path) -> None:
    for option in ([], ["--model"], ["--target"]):
        engine = configured(*option, llama).engine
        assert (engine.target, engine.draft, engine.mode) == (llama, None, "off")
    assert configured().engine.target == resolve_pair("pycode").target


def test_one_model_is_given_once(refused: Refused, llama: Path) -> None:
    assert refused(llama, "--model", llama) == f"target: {str(llama)!r} cannot be combined with MODEL; give one of them"
    assert refused(llama, "--pair", "pycode").startswith("pair: it cannot be combined")
    assert refused("org/name") == (
        "target: 'org/name' is not allowed; expected a model directory in Hugging Face format, a GGUF file, "
        "smollm2 or gemma3-270m"
    )


def test_names_with_underscores_and_with_hyphens(configured: Configured, llama: Path) -> None:
    for option in ("--max_model_len", "--max-model-len", "--max_model-len=1024"):
        arguments = [option] if "=" in option else [option, 1024]
        assert configured(llama, *arguments).engine.max_model_len == 1024


def test_numbers_as_people_write_them(configured: Configured, refused: Refused, llama: Path) -> None:
    for text, number in (("512", 512), ("1k", 1000), ("1K", 1024)):
        given = ("--max-model-len", text, "--max-num-batched-tokens", text, "--max-num-seqs", 7)
        engine = configured(llama, *given).engine
        assert (engine.max_model_len, engine.max_rows, engine.max_requests) == (number, number, 7)
    for option, text in (("--max-model-len", "auto"), ("--max-num-batched-tokens", "1.5k"), ("--max-model-len", "²")):
        assert f": {text!r} is not allowed" in refused(llama, option, text)
    assert refused(llama, "--max-model-len", "1").startswith("max_model_len: 1 is not allowed")


def test_dtypes_by_other_names(configured: Configured, refused: Refused, llama: Path) -> None:
    names = {"auto": "auto", "float": "float32", "half": "float16", "float16": "float16"}
    for name, dtype in names.items():
        assert configured(llama, "--dtype", name).engine.dtype == dtype
    assert configured(llama).engine.dtype == "auto"
    line = "dtype: 'double' is not allowed; expected auto or float32 or bfloat16 or float16"
    assert refused(llama, "--dtype", "double") == line


# -- several values

LOCAL_JSON = ["--host", "localhost", "--json"]


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        ("a b", ["MODEL", "--served-model-name", "a", "b"]),
        ("a b", ["MODEL", "--served-model-name", "a", "--served-model-name", "b"]),
        ("a b", ["--served-model-name", "a", "b", "--model", "MODEL"]),
        ("a b", ["--port", "0", "--json", "MODEL", "--served-model-name", "a", "b"]),
        ("a b", ["--served-model-name", "a", "--served-model-name", "b", "MODEL"]),
        *(("a", [*before, "--served-model-name", "a", "MODEL"]) for before in ([], ["--port", "0"], LOCAL_JSON)),
    ],
)
def test_names_and_the_model_behind_them(configured: Configured, llama: Path, names: str, arguments: list[str]) -> None:
    setup = configured(*(llama if word == "MODEL" else word for word in arguments))
    assert setup.engine.target == llama and setup.server.served_model_name == tuple(names.split())


def test_several_keys(configured: Configured, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_API_KEY", "one-of-the-environment")
    setup = configured(llama, "--api-key", "sixteen-letters-1", "sixteen-letters-2")
    assert len(setup.keys) == 3


def test_a_key_in_vllms_environment_is_not_taken_for_one_that_guards(
    configured: Configured, refused: Refused, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sixteen-letters-1")
    assert refused(llama).startswith("VLLM_API_KEY: it is not read; give PILOTFISH_API_KEY")
    configured(llama, "--allow-anonymous")
    configured(llama, "--api-key", "sixteen-letters-1")


# -- templates and defaults


def test_a_chat_template_of_a_file_or_a_text(configured: Configured, llama: Path, tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}\n{% generation %}é{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    assert configured(llama, "--chat-template", tmp_path / "chat.jinja").server.chat_template == text
    assert configured(llama, "--chat-template", text.replace("\n", "\\n")).server.chat_template == text


def test_a_chat_template_that_is_none(refused: Refused, llama: Path) -> None:
    unread = "chat_template: '/nowhere/chat.jinja' is not allowed; expected a file that can be read"
    assert refused(llama, "--chat-template", "/nowhere/chat.jinja").startswith(unread)
    line = refused(llama, "--chat-template", "{% for m in messages %}\\n{% end %}")
    assert line.startswith("chat_template: it is no Jinja template: line 2: ")


def test_the_models_defaults_and_ours_can_be_left_out(configured: Configured, refused: Refused, llama: Path) -> None:
    plain = configured(llama).server
    changed = configured(llama, "--generation-config", "vllm", "--no-special-in-user-text").server
    assert [one.generation_config for one in (plain, changed)] == ["auto", "vllm"]
    assert [one.special_in_user_text for one in (plain, changed)] == [True, False]
    assert refused(llama, "--generation-config", "/some").startswith("generation_config: '/some' is not allowed")


def test_overrides_replace_what_the_model_says(configured: Configured, llama: Path) -> None:
    """Of the engine there is what it has read."""
    files = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="the model's"), defaults={"temperature": 0.6})
    apply_overrides(files, configured(llama).server)  # type: ignore[arg-type]
    assert (files.tokenizer.chat_template, files.defaults) == ("the model's", {"temperature": 0.6})
    setup = configured(llama, "--chat-template", "{{ 1 }}", "--generation-config", "vllm")
    apply_overrides(files, setup.server)  # type: ignore[arg-type]
    assert (files.tokenizer.chat_template, files.defaults) == ("{{ 1 }}", {})


# -- flags that are not ours


def test_eager_is_what_a_cpu_does_anyway(configured: Configured, refused: Refused, llama: Path) -> None:
    assert not configured(llama, "--enforce-eager").engine.eager
    assert refused(llama, "--enforce-eager", "--device", "cuda").startswith("enforce_eager: True is not allowed")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--seed", "0"], "--seed '0': requests have seeds of their own; one that gives none"),
        (["--seed=1"], "--seed '1': requests"),
        (["-pp", "2"], "--pipeline-parallel-size '2': --tensor-parallel-size is the one way to divide a model; 1 is"),
        (["--swap-space", "-1"], "--swap-space '-1': requests are not swapped"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill: prompts are always"),
        (["--enable-chunked-prefill=False"], "--enable-chunked-prefill: it takes no value, but was given 'False': "),
        (["-O3"], "--optimization-level '3': --eager switches"),
        (["--speculative-config.method", "ngram"], "--speculative-config.method: keys are not given one by one"),
        (["--enable-prefix-cachin"], "No such option: --enable-prefix-cachin"),
        (["--max-num-seq", "3"], "No such option: --max-num-seq (Possible options: --max-n, --max-num-seqs,"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(refused: Refused, llama: Path, words: list[str], line: str) -> None:
    assert refused(llama, *words).startswith(line)


def test_words_after_two_hyphens_are_left_alone() -> None:
    assert translated(["--nodes", "3", "--", "--seed", "a_b"]) == ["--nodes", "3", "--", "--seed", "a_b"]


def test_each_flag_is_accepted_where_it_changes_nothing_and_refused_where_it_would() -> None:
    for name, flag in FLAGS.items():
        for value in flag.accepted:
            words = [f"--{name}" if value == "on" else f"--no-{name}"] if flag.switch else [f"--{name}", value]
            assert translated([*words, "MODEL"]) == ["MODEL"], words
        others = {"on": f"--{name}", "off": f"--no-{name}"} if flag.switch else {"other": f"--{name}=other"}
        for word in (word for value, word in others.items() if value not in flag.accepted):
            with pytest.raises(InputError, match=rf"^{word.partition('=')[0]}"):
                translated([word])


def test_no_flag_of_ours_is_taken_for_one_of_theirs(pilotfish: Run) -> None:
    shown = pilotfish("serve", "--help").stdout
    assert not [name for name in FLAGS if f"--{name} " in shown]


# -- docs/coming-from-vllm.md

PAGE = "coming-from-vllm.md"


def test_what_the_page_says_works_is_taken(configured: Configured, llama: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    for cell, *_ in table(PAGE, "Flags that work"):
        line = codes(cell)[0]
        for word, path in {"MODEL": llama, "DRAFT": draft, "FILE": tmp_path / "template"}.items():
            line = line.replace(word, str(path))
        assert configured(*shlex.split(line)).engine.target == llama, line


def test_what_the_page_says_of_other_flags_is_what_is_said() -> None:
    """Each flag is on the page, with the values that are accepted and the line for all others."""
    on_page = {}
    for item in items(PAGE, "Flags that change nothing, and flags that are refused"):
        flags, _, why = item.partition(": ")
        for name, accepted in re.findall(r"`--([\w-]+)`(?: \(([^)]*)\))?", flags):
            on_page[name] = Flag(why, tuple(codes(accepted) or accepted.split(", ") if accepted else ()))
    assert on_page == {name: Flag(flag.why, flag.accepted) for name, flag in FLAGS.items()}


# -- --speculative-config


def given(llama: Path, text: str, **options: Any) -> EngineConfig:
    return engine_config(with_speculative_config({"target": llama, "dtype": "float32", **options}, text))


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 6},
            {"mode": "sync", "drafters": ("ngram",), "nodes": 5, "levels": 5, "ngram_min": 2, "ngram_max": 6},
        ),
        (
            {"model": "", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
            {"mode": "sync", "drafters": ("lm",), "nodes": 3},
        ),
        ({"method": "eagle3", "model": "", "parallel_drafting": True}, {"drafters": ("lm",)}),
        ({"method": "draft_model", "model": "", "parallel_drafting": False}, {"drafters": ("lm",)}),
        ({"method": "suffix", "enable_adaptive_verification": False}, {"budget": "fixed"}),
        ({"method": "suffix", "enable_adaptive_verification": True}, {"budget": "auto"}),
    ],
)
def test_what_keys_mean(llama: Path, draft: Path, keys: dict[str, Any], fields: dict[str, Any]) -> None:
    """A head says itself whether it guesses in parallel."""
    drafted = {"model": str(draft)} if "model" in keys else {}
    config = given(llama, json.dumps({**keys, **drafted}))
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.draft == (draft if drafted else None)


def test_a_mode_that_was_given_stays(llama: Path, draft: Path) -> None:
    assert given(llama, json.dumps({"model": str(draft)}), mode="async").mode == "async"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "speculative_config"),
        ("[]", "speculative_config"),
        ('{"method": "mlp_speculator"}', "speculative_config.method: 'mlp_speculator'"),
        ('{"method": "eagle3"}', "speculative_config.model: None"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "speculative_config.num_speculative_tokens: 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "speculative_config.num_speculative_tokens: True"),
        ('{"method": "ngram", "tensor_parallel_size": 2}', "speculative_config.tensor_parallel_size: 2"),
        ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "speculative_config.draft_tensor_parallel_size: 2"),
        ('{"method": "ngram", "rejection_sample_method": "block"}', "speculative_config.rejection_sample_method"),
        ('{"method": "ngram", "max_model_len": 100}', "speculative_config.max_model_len: 100"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "ngram_max: 4"),
        ('{"model": ".", "parallel_drafting": true}', "speculative_config.parallel_drafting: True"),
        ('{"method": "draft_model"}', "speculative_config.model: None"),
        ('{"num_speculative_tokens": 4}', "speculative_config.method: None"),
        ('{"method": "ngram", "pace": 3}', "speculative_config.pace: there is no such option"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(llama: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=named.replace("[", r"\[")):
        given(llama, text)
