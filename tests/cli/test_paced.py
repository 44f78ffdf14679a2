"""`--pace` on the command line. Overruns are the fake's: no test depends on the speed of its machine."""

from pathlib import Path

import pytest
from command_runs import PLAIN, Refused
from inline_drafts import inline_drafts

from pilotfish.config.hardware.pace import Pace
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.engine import pairs
from pilotfish.engine.engine import Engine
from pilotfish.model.pacer import Pacer

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


@pytest.mark.usefixtures("overruns")
def test_json_stays_what_it_is(generate, draft: Path) -> None:
    fixed = ("--prompt", "a", "--seed", 1, "--draft", draft)
    plain, paced = generate(*fixed), generate(*fixed, "--pace", BOTH)
    assert (paced.code, paced.stderr) == (0, "")
    (row,), (paced_row,) = plain.rows, paced.rows
    assert paced_row["token_ids"] == row["token_ids"] and paced_row.keys() == row.keys()
    assert paced_row["stats"].keys() == row["stats"].keys()


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


@pytest.mark.parametrize("pace", ["target=10.4", "verify=1ms", "target=llama-3.1-70b@h100", "draft=llama-9@h100"])
def test_nonsense_is_refused_before_a_model_is_loaded(refused: Refused, llama: Path, pace: str) -> None:
    assert refused("generate", "--target", llama, "--prompt", "a", "--pace", pace).startswith("pace: ")


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
        shown = pilotfish("demo", *PLAIN, "--max-tokens", 3, "--rounds", 1, "--pace", BOTH)
    text = shown.stdout
    assert text.count("guessed by the draft, accepted") == text.count("the demo took ") == 1 and "\x1b[" not in text
    for words in ("tokens per verify step", "accepted at depth 1", "guessed by draft 0", "6 of 6 outputs equal"):
        assert text.count(words) == 2
    assert text.count("async is ") + text.count("no verdict: ") == 2
    assert "target 1.5ms, overruns 0 of 200; off and sync draft" in " ".join(text.split())
    assert "draft 500us, overruns 50 of 200" in shown.stderr
    assert pilotfish("demo", "--pace", "target=1").code == 2
