"""Declared options: every bound is kept, by the configuration and by the command line, and refused in one line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from refusals import refused

from pilotfish.cli import main
from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.config.text import config_of, config_text
from pilotfish.config.workers import DraftConfig, PrefillConfig
from pilotfish.errors import ParameterError, UnknownOptionError
from pilotfish.options import Option, check_options, option, options_of, pick, refuse_unknown, text, unset

ENGINE = EngineConfig(target=Path())
BASES: dict[type, dict[str, Any]] = {
    EngineConfig: {"target": Path()},
    DraftConfig: {"model": ENGINE, "listen": "ipc:///tmp/a"},
    PrefillConfig: {"model": ENGINE, "listen": "ipc:///tmp/a"},
    ServerConfig: {},
}
BOUNDED = [
    (cls, one) for cls in BASES for one in options_of(cls).values() if one.kind in (int, float) and one.high is not None
]


def outside(one: Option) -> list[Any]:
    """Values just beyond what the option takes, and of another type."""
    assert one.high is not None
    lowest = one.above if one.low is None else one.low
    assert lowest is not None
    below = lowest if one.low is None else lowest - 1
    beside = [below] if "or_zero" not in one.extra else [below, -1]
    nothing = [] if one.default is None else [None]
    return [*beside, one.high + 1, True, "1", *nothing, float("nan")]


@pytest.mark.parametrize(("cls", "one"), BOUNDED, ids=lambda part: getattr(part, "name", None) or part.__name__)
def test_values_beyond_a_bound_are_refused_by_name(cls: type, one: Option) -> None:
    for value in outside(one):
        if value == 0 and "or_zero" in one.extra:
            continue
        line = refused(ParameterError, cls, **{**BASES[cls], one.name: value})
        assert line.startswith(f"{one.name}: ") and " is not allowed; expected " in line


@pytest.mark.parametrize("cls", BASES)
def test_an_unknown_option_is_refused(cls: type) -> None:
    with pytest.raises(UnknownOptionError, match="nonsense: there is no such option"):
        cls(**BASES[cls], nonsense=1)


@pytest.mark.parametrize("config", [ENGINE, DraftConfig(model=ENGINE, listen="ipc:///tmp/a", key=Path("k"))])
def test_a_process_gets_the_same_configuration_as_json(config: EngineConfig | DraftConfig) -> None:
    assert config_of(config_text(config), type(config)) == config


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Small:
    """An option of each kind."""

    count: Annotated[int, option("Of things.", 2, 9, or_zero=True)] = 0
    share: Annotated[float, option("Of all.", above=0, high=1, unit="parts")] = 0.5
    seed: Annotated[int, option("Drawn if absent.", 0, (1 << 64) - 1)] | None = None
    on: Annotated[bool, option("Switched on.")] = False
    kind: Annotated[Literal["a", "b"], option("a or b.")] = "a"
    words: Annotated[Sequence[Annotated[str, text(1, 3)]], option("Some.", most=2, names=("--word",))] = ()
    scores: Annotated[Mapping[int, float], option("By number.", most=1)] = field(default_factory=dict)
    unseen: int = 3

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"count": 1}, "count: 1 is not allowed; expected 0, or an integer 2 to 9"),
        ({"share": 0}, "share: 0 is not allowed; expected a number of parts, more than 0 and at most 1"),
        ({"seed": 1 << 64}, "seed: 18446744073709551616 is not allowed; expected an integer 0 to 18446744073709551615"),
        ({"on": 1}, "on: 1 is not allowed; expected true or false"),
        ({"kind": "c"}, "kind: 'c' is not allowed; expected a or b"),
        ({"words": ("a", "b", "c")}, "words: ('a', 'b', 'c') is not allowed; expected a list of at most 2"),
        ({"words": ("a", "long")}, "words: 'long' is not allowed; expected strings of 1 to 3 characters"),
        ({"words": ("\ud800",)}, "words: '\\ud800' is not allowed; expected strings of 1 to 3 characters"),
        ({"scores": {"a": 1.0}}, "scores: 'a' is not allowed; expected an integer"),
        ({"scores": {1: "a"}}, "scores: 'a' is not allowed; expected a number"),
        ({"scores": {1: 1.0, 2: 2.0}}, "scores: {1: 1.0, 2: 2.0} is not allowed; expected a mapping of at most 1"),
    ],
)
def test_the_line_names_field_value_and_what_is_allowed(given: dict[str, Any], line: str) -> None:
    assert refused(ParameterError, Small, **given) == line


def test_options_are_picked_by_name_or_by_their_help() -> None:
    assert [one.name for one in pick(Small)] == list(options_of(Small))[:-1]
    assert [(one.name, one.default) for one in pick(Small, "kind", "count", count=4)] == [("kind", "a"), ("count", 4)]
    assert all(one.default is None for one in unset(pick(Small)))
    assert "count" not in [one.name for one in pick(Small, without=("count",))]


def test_a_schema_has_bounds_and_help() -> None:
    schema = msgspec.json.schema(Small)["$defs"]["Small"]["properties"]
    assert schema["count"] == {"type": "integer", "minimum": 0, "maximum": 9, "description": "Of things.", "default": 0}
    assert schema["share"]["exclusiveMinimum"] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--prompt", "a", "--nodes", "0"], "nodes: 0"),
        (["generate", "--prompt", "a", "--top-p", "2"], "top_p: 2.0"),
        (["chat", "--levels", "65"], "levels: 65"),
        (["serve", "--max-n", "0"], "max_n: 0"),
        (["serve", "--max-rows", "70000"], "max_rows: 70000"),
        (["draft", "--listen", "ipc:///tmp/a", "--children", "65"], "children: 65"),
        (["demo", "--max-tokens", "0"], "max_tokens: 0"),
        (["models", "check", ".", "--kv-slots", "7"], "kv_slots: 7"),
        (["train", "pair", "--out", ".", "--batch-rows", "1"], "batch_rows: 1"),
    ],
)
def test_every_command_keeps_the_bounds(arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err.startswith(f"pilotfish: {named} is not allowed; expected ")
    assert shown.err.count("\n") == 1
