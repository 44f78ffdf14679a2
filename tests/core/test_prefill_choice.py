"""Who computes a prompt: the one that has it sooner, as measured, and not where hand-overs lose."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from handover_world import WELCOME as TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sizes import sized

from pilotfish.core.prefilling import prefill_pools
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport
from pilotfish.core.prefilling.prefill_messages import PrefillLoad
from pilotfish.core.prefilling.prefill_pools import LocalSeconds, PrefillChoice, PrefillPool, PromptLoad

NOW = 1000.0
WELCOME = replace(TINY, context=20_000)
MS = 0.001


def pool(name: str = "pool", token_ms: float = 1.0, queued: int = 0) -> PrefillPool:
    """One that serves."""
    made = PrefillPool(name, name.encode())
    made.begins_life(WELCOME)
    made.serves("shm", NOW, fetches=False)
    made.heard(PrefillLoad(queued, 1000, token_ms, 0), NOW)
    made.asked = NOW
    return made


@dataclass
class Target:
    pools: tuple[PrefillPool, ...]
    choice: PrefillChoice


def choice(
    *pools: PrefillPool, least: int | None = None, token_ms: float = 1.0, ordered: Callable[[PrefillPool], int] = len
) -> Target:
    """Of a target that takes so long for a token."""
    made = Target(pools, PrefillChoice(least, ordered if ordered is not len else lambda _: 0))
    if token_ms:
        made.choice.here.observe(1000, token_ms)
    return made


def prompt(missing: int, first: int = 0, waiting: int = 0, neighbours: int = 0) -> PromptLoad:
    return PromptLoad(list(range(first + missing)), first, None, waiting, neighbours)


def chosen(of: Target, asked: PromptLoad, now: float = NOW) -> str | None:
    option = of.choice.option(asked, of.pools, now)
    return None if option is None else option.pool.name


def test_a_number_is_a_threshold() -> None:
    of = choice(pool(token_ms=50.0), least=300)
    assert chosen(of, prompt(299)) is None
    assert chosen(of, prompt(300)) == "pool"
    assert chosen(of, prompt(299, first=5000)) is None  # what it has does not count


def test_what_is_sooner_is_chosen() -> None:
    assert chosen(choice(pool(token_ms=0.9)), prompt(1000)) == "pool"
    assert chosen(choice(pool(token_ms=1.2)), prompt(1000)) is None
    assert chosen(choice(pool(token_ms=1.2)), prompt(1000, waiting=500)) == "pool"  # others come first here
    assert chosen(choice(pool(token_ms=0.9, queued=500)), prompt(1000)) is None  # and there
    assert chosen(choice(pool(token_ms=0.5)), prompt(prefill_pools.FEW - 1)) is None


def test_what_decodes_here_is_worth_a_little() -> None:
    of = choice(pool(token_ms=1.05))
    assert chosen(of, prompt(1000)) is None
    assert chosen(of, prompt(1000, neighbours=3)) == "pool"
    of.choice.here.observe(0, 0.2)
    # Its last row waits for a step, and is one; here its last chunk wastes a part of one.
    assert chosen(of, prompt(1000, neighbours=3)) is None


def test_a_queue_is_waited_for_where_others_decode_here() -> None:
    def of(queued: int, token_ms: float = 1.0) -> Target:
        return choice(pool(token_ms=token_ms, queued=queued))

    assert chosen(of(1), prompt(1000)) is None
    assert chosen(of(999), prompt(1000, neighbours=3)) == "pool"
    assert chosen(of(1001), prompt(1000, neighbours=3)) is None
    assert chosen(of(0, token_ms=1.2), prompt(1000, neighbours=3)) is None  # too slow without one


def test_a_pool_computes_what_it_has_not_and_the_target_what_it_has_not() -> None:
    one = pool(token_ms=0.6)
    of = choice(one)
    assert chosen(of, prompt(1000, first=3000)) is None  # it would compute all 4,000
    one.told.tell(None, list(range(3000)))
    assert chosen(of, prompt(1000, first=3000)) == "pool"


def test_what_was_ordered_counts_before_the_pool_tells_of_it() -> None:
    assert chosen(choice(pool(token_ms=0.5), ordered=lambda _: 900), prompt(1000)) == "pool"
    assert chosen(choice(pool(token_ms=0.5), ordered=lambda _: 1100), prompt(1000)) is None


def test_the_soonest_of_several_pools_computes_it() -> None:
    slow, busy, right, short = pool("slow", 0.9), pool("busy", 0.1, 9000), pool("right", 0.5), pool("away", 0.1)
    short.leaves()
    assert chosen(choice(slow, busy, right, short), prompt(1000)) == "right"
    right.draining = True
    assert chosen(choice(slow, busy, right, short), prompt(1000)) == "slow"
    right.draining = False
    right.busy(NOW)
    assert chosen(choice(slow, busy, right, short), prompt(1000)) == "slow"
    assert chosen(choice(slow, busy, right, short), prompt(WELCOME.context + 1)) is None


def test_before_anything_is_measured_long_prompts_are_sent() -> None:
    for of in (choice(pool(token_ms=0.0)), choice(pool(), token_ms=0.0)):
        assert chosen(of, prompt(prefill_pools.TRIAL - 1)) is None
        assert chosen(of, prompt(prefill_pools.TRIAL)) == "pool"


def test_a_pool_that_is_not_worth_it_is_tried_again_less_and_less_often() -> None:
    one = pool(token_ms=30.0)
    of, tried = choice(one), list[float]()
    for second in range(3000):
        if chosen(of, prompt(1000), NOW + second) is not None:
            tried.append(second)
            one.asked = NOW + second
    gaps = [prefill_pools.RETRIAL * 2.0 ** min(k, prefill_pools.MAX_RETRIALS) for k in range(len(tried))]
    assert tried == np.cumsum(gaps).tolist()
    assert len(tried) > prefill_pools.MAX_RETRIALS
    one.heard(PrefillLoad(0, 1000, 0.1, 0), NOW)  # a trial found it quick
    assert chosen(of, prompt(1000), NOW + 3000) == "pool"
    assert one.retrials == 0


def test_a_pool_whose_hand_overs_take_too_long_is_not_chosen_until_one_has_come() -> None:
    one = pool(token_ms=0.5)
    of = choice(one)
    one.exposed.lose(2.0)
    one.exposed.lose(0.1)
    assert chosen(of, prompt(1000)) is None and chosen(of, prompt(5000)) == "pool"  # which is worth even that
    assert chosen(of, prompt(1000), NOW + prefill_pools.RETRIAL) == "pool"  # and is tried
    one.succeeded(HandOverReport(outcome=WHOLE, tokens=1000, seconds=0.51, computing=0.5))
    assert chosen(of, prompt(1000)) == "pool"
    one.exposed.lose(2.0)
    assert chosen(of, prompt(1000)) is None
    one.begins_life(WELCOME)
    one.serves("shm", NOW, fetches=False)
    one.heard(PrefillLoad(0, 1000, 0.5, 0), NOW)
    assert chosen(of, prompt(1000)) == "pool"


def test_large_forwards_say_most_of_what_a_token_takes() -> None:
    here = LocalSeconds()
    assert here.token is None and here.step.value == 0.0
    here.observe(3, 9.0)  # of few tokens most went to something else
    assert here.token is None
    for _ in range(50):
        here.observe(0, 0.02)
        here.observe(64, 0.064 * 4)
        here.observe(256, 0.256)
    assert here.token is not None and 1.5 * MS < here.token < 1.7 * MS  # not 2.5, the mean of both
    assert here.step.value == pytest.approx(0.02)


@settings(max_examples=sized(12, 60), deadline=None)
@given(
    here=st.floats(0.05, 5.0),
    there=st.floats(0.05, 5.0),
    latency=st.floats(0.0, 200.0),
    link=st.floats(0.0, 3.0),
    seed=st.integers(0, 9),
)
def test_losing_hand_overs_are_not_chosen(here: float, there: float, latency: float, link: float, seed: int) -> None:
    """Milliseconds a token here and there, and of what a hand-over takes on top. Once some of it is measured many
    prompts take hardly longer, trials apart, than if each were computed where it is sooner."""
    one, rng = pool(token_ms=there), np.random.default_rng(seed)
    of, taken, best, now, trials = choice(one, token_ms=here), 0.0, 0.0, NOW, 0
    for number in range(200):
        tokens, before = int(rng.integers(prefill_pools.FEW, 6000)), one.retrials
        computed, handed = here * tokens, there * tokens + latency + link * tokens
        option = of.choice.option(prompt(tokens), of.pools, now)
        if option is not None:
            one.asked = now
            report = HandOverReport(seconds=handed * MS, computing=there * tokens * MS, outcome=WHOLE, tokens=tokens)
            one.succeeded(report)
        now += (computed if option is None else handed) * MS
        trials += one.retrials > before
        if number >= 30 and one.retrials <= before:
            taken += computed if option is None else handed
            best += min(computed, handed)
    assert taken <= 1.15 * best
    assert trials <= 1 + (now - NOW) / prefill_pools.RETRIAL
