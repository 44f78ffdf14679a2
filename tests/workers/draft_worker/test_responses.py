"""Past responses: bounded, oldest forgotten first, and of one tenant only."""

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.workers.automaton import SuffixAutomaton
from pilotfish.workers.suffix import MAX_TENANTS, ResponseCache, Responses


def knows(automata: tuple[SuffixAutomaton, ...], tokens: list[int]) -> bool:
    return any(each.match(tokens).length == len(tokens) for each in automata)


@given(lengths=st.lists(st.integers(0, 12), max_size=40))
def test_the_newest_responses_stay_whole(lengths: list[int]) -> None:
    """Response i is i, i, …: whatever is held is a run of the newest, and it fills half of the room or holds all."""
    responses = Responses(20)
    for index, length in enumerate(lengths):
        responses.add([index] * length)
        assert responses.num_tokens <= 20
    fit = [(index, length) for index, length in enumerate(lengths) if 0 < length <= 10]
    held = [knows(responses.automata, [index] * length) for index, length in fit]
    assert held == sorted(held)
    kept = sum(length for (_, length), there in zip(fit, held, strict=True) if there)
    assert kept == responses.num_tokens
    longest = max((length for _, length in fit), default=0)
    assert all(held) or kept > 10 - longest


def test_responses_do_not_run_into_one_another() -> None:
    responses = Responses(20)
    responses.add([1, 2])
    responses.add([3, 4])
    assert knows(responses.automata, [1, 2]) and knows(responses.automata, [3, 4])
    assert not knows(responses.automata, [2, 3])


def test_a_tenant_sees_its_own_responses_only() -> None:
    cache = ResponseCache(20)
    cache.add("a", [1, 2])
    cache.add("b", [3, 4])
    assert knows(cache.automata("a"), [1, 2]) and not knows(cache.automata("a"), [3])
    assert knows(cache.automata("b"), [3, 4]) and not knows(cache.automata("b"), [1])
    assert cache.automata("c") == () and cache.automata(None) == ()
    assert len(cache._tenants) == 2  # asking makes no tenant


def test_the_tenant_not_used_for_longest_goes_first() -> None:
    cache = ResponseCache(20)
    for name in "abcd":
        cache.add(name, [ord(name)] * 5)
    cache.automata("a")
    cache.add("e", [1])
    assert [name for name in "abcde" if cache.automata(name)] == ["a", "c", "d", "e"]


@given(added=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 12)), max_size=40))
def test_all_tenants_together_are_bounded(added: list[tuple[str, int]]) -> None:
    cache = ResponseCache(20)
    for name, length in added:
        cache.add(name, [1] * length)
        assert cache.num_tokens <= 20
        if 0 < length <= 10:
            assert knows(cache.automata(name), [1] * length)


def test_so_is_their_number() -> None:
    cache = ResponseCache(1 << 20)
    for index in range(MAX_TENANTS + 5):
        cache.add(str(index), [1])
    assert len(cache._tenants) == MAX_TENANTS
    assert not cache.automata("4") and cache.automata("5")
