"""The house keeps its limits, and its counts would notice."""

import house
import pytest


def test_the_house_keeps_its_limits() -> None:
    counted = house.counts()
    assert {what: count for what, count in counted.items() if count > house.LIMITS[what]} == {}
    assert counted.keys() == house.LIMITS.keys()
    assert all(counted[what] > 0 for what, limit in house.LIMITS.items() if limit), "something is not counted"


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [{"a", "b"}]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, [{"d", "e"}, {"a", "b", "c"}]),
    ],
)
def test_circles_are_found(graph: dict[str, set[str]], circles: list[set[str]]) -> None:
    assert house.circles(graph) == circles


@pytest.mark.parametrize(
    ("text", "number"), [("", 0), ("Rows go in.", 1), ("In. Out. Open `x.py` first:\n\n    a ─► b. c. d.", 3)]
)
def test_sentences_are_counted_before_a_drawing(text: str, number: int) -> None:
    assert house.sentences(text) == number
