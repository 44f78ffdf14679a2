"""Explanations of changes whose cause is known: the first cause named is the one that was built in."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import pytest
from explained_traffic import Traffic, cells_of
from hypothesis import given
from hypothesis import strategies as st
from pages import codes, table
from sizes import sized

from pilotfish.operate.explaining.causes import find_causes
from pilotfish.operate.explaining.cohorts import DIMENSIONS, Cell, CellKey, merged
from pilotfish.operate.explaining.explain import explain
from pilotfish.operate.explaining.explain_wording import ADVICE, GOOD, NOTHING
from pilotfish.operate.explaining.explanation import Cause, CohortFigures, Explanation, Kind, depth_loss
from pilotfish.operate.explaining.paired import PairedCells

USUAL = Traffic()
ONE_DRAFT = Traffic(shares={"draft": {"r1": 1}})


@dataclass(frozen=True)
class Change:
    """What was built in. `kind` None: nothing, which `verdict` says."""

    before: Traffic
    after: Traffic
    kind: Kind | None
    dimension: str | None = None
    values: tuple[str, ...] = ()
    verdict: str = "changed"


def tags(chat: float, code: float, summary: float, **more: Any) -> Traffic:
    return Traffic(shares={"tag": {"chat": chat, "code": code, "summary": summary}}, **more)


def of(dimension: str, shares: dict[str, float], **ease: float) -> Traffic:
    """With these shares of a dimension's values, of which some are less easy to guess."""
    return Traffic(shares={dimension: shares}, ease={(dimension, value): factor for value, factor in ease.items()})


HARD_SUMMARIES: dict[str, Any] = {"ease": {("tag", "summary"): 0.75}}
SUMMARIES = ("tag", ("summary",))
HELD_OUT = {"variant": {"on": 0.7, "off": 0.3}}
FEW, MANY = replace(USUAL, requests=60), replace(USUAL, requests=5000)
CONTEXTS = {"64": 0.1, "256": 0.2, "1024": 0.3, "4096": 0.4}
CHANGES = {
    "mix alone": Change(USUAL, tags(0.3, 0.1, 0.6), "mix", *SUMMARIES),
    "drift alone": Change(USUAL, Traffic(right=0.62), "drift"),
    "both, more mix": Change(USUAL, tags(0.2, 0.1, 0.7, right=0.67), "mix", *SUMMARIES),
    "both, more drift": Change(USUAL, tags(0.45, 0.2, 0.35, right=0.58), "drift"),
    "Simpson's paradox": Change(
        tags(0.2, 0.7, 0.1, **HARD_SUMMARIES), tags(0.1, 0.1, 0.8, right=0.77, **HARD_SUMMARIES), "mix", *SUMMARIES
    ),
    "lateness": Change(USUAL, Traffic(late=0.3), "late"),
    "temperature": Change(
        USUAL, of("temperature", {"0": 0.1, "<=0.5": 0.1, "<=1": 0.8}), "temperature", "temperature", ("<=1",)
    ),
    "structured outputs": Change(
        USUAL, of("output", {"text": 0.4, "json": 0.5, "tools": 0.1}), "structured", "output", ("json",)
    ),
    "longer contexts": Change(USUAL, of("context", CONTEXTS), "context", "context", ("4096",)),
    "a new draft revision": Change(ONE_DRAFT, of("draft", {"r1": 0.7, "r3": 0.3}, r3=0.6), "draft", "draft", ("r3",)),
    "a draft revision that went bad": Change(USUAL, Traffic(ease={("draft", "r2"): 0.7}), "draft", "draft", ("r2",)),
    "a new client": Change(
        USUAL,
        of("client", {"acme": 0.3, "bolt": 0.25, "corp": 0.2, "dune": 0.25}, dune=0.65),
        "client",
        "client",
        ("dune",),
    ),
    "a client that changed": Change(USUAL, Traffic(ease={("client", "corp"): 0.7}), "client", "client", ("corp",)),
    "a drift in one tag": Change(USUAL, Traffic(ease={("tag", "code"): 0.8}), "drift", "tag", ("code",)),
    "clients that come and go": Change(
        USUAL, Traffic(shares={"client": {"acme": 0.4, "bolt": 0.35, "dune": 0.25}}, right=0.58), "drift"
    ),
    "a holdout that cannot change": Change(Traffic(shares=HELD_OUT), Traffic(shares=HELD_OUT, right=0.6), "drift"),
    "nothing": Change(MANY, MANY, None, verdict="same"),
    "too little": Change(FEW, FEW, None, verdict="unclear"),
}


@cache
def usual_cells(seed: int) -> list[Cell]:
    return cells_of(USUAL, seed)


def explained(before: Traffic, after: Traffic, seed: int = 0) -> Explanation:
    old = usual_cells(2 * seed) if before is USUAL else cells_of(before, 2 * seed)
    return explain(old, cells_of(after, 2 * seed + 1))


def named(cause: Cause) -> tuple[Kind, str | None, tuple[str, ...]]:
    return cause.kind, cause.dimension, tuple(cause.values)


@pytest.mark.parametrize("seed", sized(range(1), range(3)))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_first_cause_is_the_one_that_was_built_in(change: Change, seed: int) -> None:
    found = explained(change.before, change.after, seed)
    assert found.verdict == change.verdict
    if change.kind is None:
        assert found.causes == ()
    else:
        assert named(found.causes[0]) == (change.kind, change.dimension, change.values)
        assert found.causes[0].share > 0.5
    assert sum(one.effect for one in found.causes) + found.rest == pytest.approx(found.change, abs=1e-12)


def test_simpsons_paradox_has_both_causes_with_opposite_signs() -> None:
    change = CHANGES["Simpson's paradox"]
    mix, drift = explained(change.before, change.after).causes
    assert mix.effect < 0 < drift.effect and mix.share > 0 > drift.share
    assert (drift.kind, drift.dimension, drift.advice) == ("drift", None, GOOD)


def test_lateness_is_placed_where_it_is() -> None:
    (cause,) = explained(USUAL, Traffic(late_at={("draft", "r2"): 0.5})).causes
    assert named(cause) == ("late", "draft", ("r2",)) and cause.depth is None
    assert (cause.before.late, cause.after.late) == (pytest.approx(0.05, abs=0.02), pytest.approx(0.5, abs=0.02))


def test_a_new_draft_that_is_late_is_told_to_be_slow_and_not_wrong() -> None:
    after = Traffic(shares={"draft": {"r1": 0.7, "r3": 0.3}}, late_at={("draft", "r3"): 0.6})
    (cause,) = explained(ONE_DRAFT, after).causes
    assert (*named(cause), cause.factor) == ("draft", "draft", ("r3",), "late")
    assert "too slow, not wrong" in cause.advice


def test_fewer_wanted_trees_are_no_worse_guesses_where_the_load_rose() -> None:
    (cause,) = explained(USUAL, Traffic(wanted=0.6, load=24)).causes
    assert named(cause) == ("wanted", None, ())
    assert cause.sentence.endswith("before; 24.00 sequences shared a step, 8.00 before.")


def test_what_a_budget_gives_up_at_the_same_load_is_a_drift() -> None:
    (cause,) = explained(USUAL, Traffic(wanted=0.05, load=9)).causes
    assert (*named(cause), cause.factor) == ("drift", None, (), "wanted")
    assert "train it" in cause.advice


def test_a_larger_holdout_is_a_change_of_shares() -> None:
    (cause,) = explained(USUAL, Traffic(shares=HELD_OUT)).causes
    assert (*named(cause), cause.part, cause.factor) == ("variant", "variant", ("off",), "mix", "wanted")


def test_of_two_dimensions_that_are_one_the_more_direct_is_named() -> None:
    """A canary that has a draft of its own."""
    of_variant = {"on": "r1", "off": "none", "canary": "r3"}
    before = Traffic(tied={"draft": ("variant", of_variant)})
    shares = {"variant": {"on": 0.65, "off": 0.05, "canary": 0.3}}
    (cause,) = explained(before, replace(before, shares=shares, ease={("draft", "r3"): 0.6})).causes
    assert named(cause) == ("draft", "draft", ("r3",)) and cause.alike == ("variant",)
    assert "cannot be told from a change by variant" in cause.sentence


def test_parts_add_up_in_every_dimension() -> None:
    found = explained(USUAL, CHANGES["both, more mix"].after)
    assert tuple(one.dimension for one in found.parts) == (*DIMENSIONS, "all")
    for one in found.parts:
        assert one.mix + one.within + one.interaction == pytest.approx(found.change, abs=1e-12)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 50), (50, 0)])
def test_without_requests_nothing_is_said(before: int, after: int) -> None:
    cells = [cells_of(replace(USUAL, requests=count), 0) if count else [] for count in (before, after)]
    found = explain(*cells)
    assert (found.verdict, found.sentence, found.causes) == ("unclear", NOTHING, ())


def test_a_few_requests_never_make_a_change() -> None:
    """They may all be alike, so that their mean seems sure."""
    cells = [[Cell(key=CellKey(), requests=9, steps=90, trees=90, accepted=a, accepted_squared=a * a // 9,
                   accepted_steps=10 * a, steps_squared=900)] for a in (90, 9)]  # fmt: skip
    assert explain(*cells).verdict == "unclear"


def test_the_page_has_every_cause() -> None:
    kinds = [codes(row[0])[0] for row in table("explaining.md", "Causes, and what to do")]
    assert sorted(kinds) == sorted(get_args(Kind)) == sorted(ADVICE)


# -- the depth that lost most


def figures(by_depth: tuple[float, ...], reached: tuple[float, ...]) -> CohortFigures:
    accepted = sum(share * trees for share, trees in zip(by_depth, reached, strict=True))
    return CohortFigures(requests=9, cut=0, share=1.0, accepted_per_step=accepted, wanted=1.0, late=0.0,
                          accepted_per_tree=accepted, nodes_per_tree=8.0, tokens_per_step=1 + accepted, load=8.0,
                          by_depth=by_depth, reached=reached)  # fmt: skip


def test_the_depth_that_lost_most_counts_how_many_trees_came_there() -> None:
    loss = depth_loss(figures((0.8, 0.7, 0.6), (1.0, 0.8, 0.56)), figures((0.8, 0.5, 0.3), (1.0, 0.8, 0.4)))
    assert loss is not None and (loss.depth, loss.before, loss.after) == (3, 0.6, 0.3)
    loss = depth_loss(figures((0.8, 0.7, 0.6), (1.0, 0.8, 0.2)), figures((0.8, 0.5, 0.3), (1.0, 0.8, 0.1)))
    assert loss is not None and loss.depth == 2


def test_where_trees_got_better_it_is_the_depth_that_won() -> None:
    loss = depth_loss(figures((0.8, 0.5), (1.0, 0.8)), figures((0.75, 0.9), (1.0, 0.75)))
    assert loss is not None and (loss.depth, loss.after) == (2, 0.9)


# -- any counts


@st.composite
def any_cells(draw: st.DrawFn) -> list[Cell]:
    """Of few cohorts, consistent or not: a file may hold anything."""
    count = st.integers(0, 1000)
    key = st.builds(CellKey, tag=st.sampled_from("abc"), draft=st.sampled_from(["none", "r1"]))
    names = ("requests", "trees", "late", "accepted", "accepted_squared", "accepted_steps", "steps_squared")
    cell = st.builds(Cell, key=key, steps=st.integers(0, 50), **dict.fromkeys(names, count))
    first = Cell(key=CellKey(), requests=draw(st.integers(1, 99)), steps=draw(st.integers(1, 99)), steps_squared=1)
    return merged([first, *draw(st.lists(cell, max_size=8))])


@given(any_cells(), any_cells())
def test_any_counts_have_causes_that_can_be_told(before: list[Cell], after: list[Cell]) -> None:
    explain(before, after)
    for cause in find_causes(PairedCells.of(before, after)):
        assert cause.effect == cause.effect and (cause.dimension is None) == (cause.values == ())
