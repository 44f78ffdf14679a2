"""The planner: each formula by hand, and laws that hold whatever is placed where."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pilotfish.config.hardware.cost import ForwardLoad, PlacedModel
from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import DEVICES, LINKS, PILOTFISH
from pilotfish.errors import ParameterError
from pilotfish.plan.planner.acceptance import CHAINS, GuessedTree, PairAcceptance, published_acceptance
from pilotfish.plan.planner.choice import break_even, choose, gain, paying_ranges, shortfall
from pilotfish.plan.planner.decoding import STALE, best_step, plain_step, speculative_step
from pilotfish.plan.planner.demand import Demand, LoadLimits, RequestKind
from pilotfish.plan.planner.deployment import Deployment, DraftPlacement, Mode, PrefillPlacement
from pilotfish.plan.planner.load import LoadedDeployment, PromptWork, hand_over_seconds, prompt_time, wait_seconds
from pilotfish.plan.planner.outlook import outlook
from pilotfish.plan.planner.situation import OfferedDevice, OfferedDraft, OfferedPlacement, PlannedTier, Situation
from pilotfish.plan.published import PUBLISHED, RunModel, SyncInputs, error_band
from pilotfish.plan.rounds import tokens_of_chain
from pilotfish.plan.trace import TimedRequest, recorded_load

ONE_KIND = (RequestKind(prompt=2000, output=400),)
DEMAND = Demand(requests=ONE_KIND, shared=0.25, users=8)
HOST, LEVEL = 1.9e-3, 0.35e-3
counts = st.integers(1, 64)
rates = st.floats(0.05, 0.95)


def placed(model: str = "llama-3.1-8b", device: str = "h100", count: int = 1, **more: Any) -> PlacedModel:
    return PlacedModel(model=MODELS[model], device=DEVICES[device], count=count, engine=PILOTFISH, **more)


@dataclass(frozen=True)
class Drafted:
    """A small draft of an 8B target, of which each guess is accepted with `rate`."""

    rate: float = 0.7
    trees: tuple[GuessedTree, ...] = ()

    def beside(self, mode: Mode = "sync", *, resident: bool = True, **more: Any) -> Deployment:
        rate = None if self.trees else self.rate
        acceptance = PairAcceptance(rate=rate, trees=self.trees, sources=("a",))
        draft = DraftPlacement(
            name="llama-3.2-1b",
            placed=placed("llama-3.2-1b", "h100" if resident else "l40s"),
            acceptance=acceptance,
            resident=resident,
            workers=0 if resident else 1,
        )
        return Deployment(target=placed(), replicas=1, mode=mode, draft=draft, **more)


THREE = Drafted(trees=(GuessedTree(nodes=3, levels=3, gained=1.5),))
KINDS = [("sync", True), ("sync", False), ("async", False)]


def situation(**more: Any) -> Situation:
    fields: dict[str, Any] = {
        "target": "llama-3.1-8b",
        "devices": (OfferedDevice(name="h100", count=2),),
        "drafts": (OfferedDraft(model="llama-3.2-1b", rate=0.7),),
        "workload": DEMAND,
    }
    return Situation(**{**fields, **more})


def test_a_plain_step_is_a_forward_and_the_host() -> None:
    forward = placed().seconds(ForwardLoad(rows=8, sequences=8, context=2200))
    step = plain_step(placed(), 8, 2200)
    assert step.seconds == pytest.approx(forward + HOST) and step.tokens == 1
    assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_guesses_in_turn_are_levels_and_a_verification() -> None:
    deployment = THREE.beside()
    level = deployment.draft.placed.seconds(ForwardLoad(rows=8, sequences=8, context=2200)) + LEVEL
    verify = placed().seconds(ForwardLoad(rows=32, sequences=8, context=2200))
    step = speculative_step(deployment, 8, 2200)
    assert step is not None and step.tokens == 2.5
    assert step.seconds == pytest.approx(3 * level + verify + HOST)


def test_a_draft_on_another_host_costs_an_exchange() -> None:
    """Of 16 bytes for each guess and the last token of each sequence."""
    near, far = (THREE.beside(resident=False, link=LINKS[link]) for link in ("infiniband-ndr", "roce-100g"))
    steps = [speculative_step(one, 8, 2200) for one in (near, far)]
    assert steps[0] and steps[1]
    assert steps[1].parts["link"] == pytest.approx(2 * 3e-6 + 8 * 4 * 16 / 12.5e9)
    assert steps[1].seconds - steps[0].seconds == pytest.approx(steps[1].parts["link"] - steps[0].parts["link"])


def test_guesses_beside_the_target_commit_no_more_than_levels_grow() -> None:
    deployment = THREE.beside("async", resident=False)
    level = deployment.draft.placed.seconds(ForwardLoad(rows=64, sequences=8, context=2200)) + LEVEL
    verify = placed().seconds(ForwardLoad(rows=32, sequences=8, context=2200))
    exchange = deployment.link.exchange(8 * 4 * 16)
    speeds = [
        min(depth, 1 + STALE * 1.5) / (max(verify, depth * level + exchange) + 0.1 * level + HOST)
        for depth in range(1, 5)
    ]
    step = speculative_step(deployment, 8, 2200)
    assert step is not None and step.speed == pytest.approx(max(speeds))
    assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_a_shared_draft_serves_all_its_targets() -> None:
    alone, shared = (replace(THREE.beside("sync", resident=False), replicas=count) for count in (1, 4))
    several = speculative_step(shared, 2, 2200)
    level = alone.draft.placed.seconds(ForwardLoad(rows=8, sequences=8, context=2200)) + LEVEL
    assert several is not None and several.parts["draft"] == pytest.approx(3 * level)


def test_prompts_beside_and_alone() -> None:
    """1500 of 2000 tokens are new, in one chunk; each sees 1250 tokens before it in the mean. Alone they read the
    weights and pay for layers, beside steps they do not."""
    time = prompt_time(placed(), 2000, 0.25)
    products = 2 * MODELS["llama-3.1-8b"].multiplied * 1500 / (0.6 * 989e12)
    attending = placed().context_products_seconds(1500, 1250)
    kv = placed().context_seconds(500)
    assert time.chunks == 1 and time.beside == pytest.approx(products + attending + kv)
    assert time.alone == pytest.approx(placed().seconds(ForwardLoad(rows=1500, context=500)) + attending)


def test_a_target_completes_requests() -> None:
    deployment = Deployment(target=placed(), replicas=2)
    point = LoadedDeployment(deployment, DEMAND, LoadLimits()).at(8)
    step = plain_step(placed(), 8, DEMAND.context)
    rate = 1 / (400 * step.seconds / 8 + prompt_time(placed(), 2000, 0.25, 8).beside)
    assert point.requests == pytest.approx(2 * rate) and point.tokens == pytest.approx(800 * rate)
    assert point.speed == pytest.approx(rate * 400 / 8) and sum(point.shares.values()) == pytest.approx(1)


def test_the_mean_context_is_that_of_steps() -> None:
    """A long output has more steps: 100 at 1050 tokens, 300 at 2150."""
    kinds = (RequestKind(prompt=1000, output=100), RequestKind(prompt=2000, output=300))
    assert Demand(requests=kinds, users=1).context == pytest.approx((100 * 1050 + 300 * 2150) / 400)


def test_queues_and_hand_overs() -> None:
    load = PromptWork(busy=0.5, busy_squared=0.25, chunks=1)
    assert wait_seconds(1.0, load) == pytest.approx(0.25) and wait_seconds(2.0, load) == float("inf")
    apart = Deployment(target=placed(), replicas=1, prefill=PrefillPlacement(placed=placed(), workers=1))
    assert hand_over_seconds(apart, DEMAND) == pytest.approx(0.1 * (6e-6 + 1500 * 131072 / 12.5e9))


def test_a_resident_draft_takes_room() -> None:
    """2 x 1.236e9 bytes of weights, and 32768 of each token's KV beside 131072."""
    plain, drafted = Deployment(target=placed(), replicas=1), THREE.beside()
    room = placed().kv_room
    assert drafted.kv_tokens == pytest.approx((room - drafted.draft.placed.weight_bytes) / 163840)
    assert drafted.tokens_taken == pytest.approx(plain.kv_tokens - drafted.kv_tokens) and plain.tokens_taken == 0


def test_a_draft_on_one_of_several_devices_bounds_all() -> None:
    four = replace(THREE.beside(), target=placed(count=4))
    room = placed(count=4).kv_room - 4 * four.draft.placed.weight_bytes
    assert four.kv_tokens == pytest.approx(room / (131072 + 4 * 32768))


def test_money_and_joules() -> None:
    """Two H100 at 1.99 to 5 USD an hour and 700 W, busy all the time."""
    found = outlook(situation(), Deployment(target=placed(), replicas=2))
    assert found is not None and found.token_cost is not None
    million = found.point.tokens * 3600 / 1e6
    assert found.token_cost.low == pytest.approx(3.98 / million)
    assert found.token_cost.high == pytest.approx(10 / million)
    assert found.joules == pytest.approx(1400 / found.point.tokens * 1e6)


def test_bands_are_quantiles_of_published_errors() -> None:
    errors = sorted(1 / (1 + row.error) for row in PUBLISHED.values() if row.kind == "predicted" and row.mode == "sync")
    band = error_band("sync")
    assert band.rows == len(errors) == 18 and errors[1] < band.low < errors[2] and errors[15] < band.high < errors[16]
    assert 0.8 < error_band("async").low < error_band("async").high < 1  # all of them were predicted too fast


@given(counts, rates, st.floats(1, 8), st.sampled_from(KINDS))
def test_more_bandwidth_is_never_slower(sequences: int, rate: float, times: float, kind: tuple[Mode, bool]) -> None:
    slow = Drafted(rate).beside(kind[0], resident=kind[1])
    device = replace(DEVICES["h100"], bandwidth=times * DEVICES["h100"].bandwidth)
    fast = replace(slow, target=replace(placed(), device=device))
    assert best_step(fast, sequences, 2200).speed >= best_step(slow, sequences, 2200).speed * (1 - 1e-9)


@given(counts, rates, st.floats(1, 3), st.sampled_from(KINDS))
def test_more_acceptance_is_never_slower(sequences: int, rate: float, times: float, kind: tuple[Mode, bool]) -> None:
    deployment = Drafted(rate).beside(kind[0], resident=kind[1])
    draft = replace(deployment.draft, acceptance=deployment.draft.acceptance.scaled(times))
    assert gain(replace(deployment, draft=draft), sequences, 2200) >= gain(deployment, sequences, 2200) * (1 - 1e-9)


@given(rates, st.sampled_from(KINDS))
def test_a_token_is_cheaper_the_more_users_there_are(rate: float, kind: tuple[Mode, bool]) -> None:
    loaded = LoadedDeployment(Drafted(rate).beside(kind[0], resident=kind[1]), DEMAND, LoadLimits())
    tokens = [loaded.at(sequences).tokens for sequences in range(1, min(loaded.most, 64))]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(tokens))


@settings(max_examples=30)
@given(st.floats(0.05, 0.6), st.sampled_from(KINDS), st.sampled_from(["llama-3.1-8b", "qwen3-235b-a22b"]))
def test_speculation_pays_where_the_curves_say_so(rate: float, kind: tuple[Mode, bool], target: str) -> None:
    deployment = replace(Drafted(rate).beside(kind[0], resident=kind[1]), target=placed(target, "h200", 4))
    for span in paying_ranges(deployment, 500, 400):
        assert gain(deployment, span.first, 500) >= 1 and gain(deployment, span.last, 500) >= 1
        assert span.first == 1 or gain(deployment, span.first - 1, 500) < 1
        assert span.last == 400 or gain(deployment, span.last + 1, 500) < 1


@given(counts, rates)
def test_speculation_breaks_even_where_it_is_as_fast(sequences: int, rate: float) -> None:
    deployment = Drafted(rate).beside()
    even = break_even(deployment, sequences, 2200)
    assert even is not None and even.rate is not None
    assert gain(Drafted(even.rate).beside(), sequences, 2200) == pytest.approx(1, abs=1e-6)
    assert (rate >= even.rate) == (gain(deployment, sequences, 2200) >= 1)


def test_what_speculates_beyond_the_crossover_steps_plainly() -> None:
    deployment = Drafted(0.3).beside()
    last = paying_ranges(deployment, 500, 400)[-1].last
    assert last < 400 and best_step(deployment, last + 1, 500) == plain_step(placed(), last + 1, 500)


def test_plain_decoding_is_always_tried_and_wins_where_guesses_are_wrong() -> None:
    wrong, right = (choose(situation(drafts=(OfferedDraft(model="llama-3.2-1b", rate=r),))) for r in (0.0, 0.8))
    assert wrong.chosen.deployment.mode == "off" and wrong.break_even is not None and wrong.break_even > 0
    assert right.chosen.deployment.mode != "off" and "off" in {one.deployment.kind for one in right.kinds}


def test_the_best_of_all_is_chosen() -> None:
    for objective in ("cost", "speed"):
        choice = choose(situation(objective=objective))
        figures = [
            one.token_cost.mean if objective == "cost" else -one.point.speed for one in choice.kinds if one.serves
        ]
        assert min(figures) == pytest.approx(figures[0], rel=0.01)
        assert choice.kinds[0] == choice.chosen


def test_a_larger_load_takes_more_devices_until_there_are_no_more() -> None:
    loads = [replace(DEMAND, users=None, rate=rate) for rate in (1.0, 4.0, 500.0)]
    small, large, most = (
        choose(situation(devices=(OfferedDevice(name="l40s", count=4, price=(1.0, 1.0)),), drafts=(), workload=load))
        for load in loads
    )
    assert small.chosen.device_count < large.chosen.device_count <= 4
    assert small.chosen.serves and not most.chosen.serves and 0.5 < shortfall(most) < 1


def test_sensitivity_is_of_the_same_deployment() -> None:
    rows = {row.name: row for row in choose(situation()).sensitivity}
    assert list(rows) == ["-20%", "-10%", "as given", "+10%"]
    assert rows["-20%"].speed < rows["as given"].speed < rows["+10%"].speed
    assert rows["+10%"].acceptance == pytest.approx(0.77)


def test_limits_stop_a_target() -> None:
    deployment = Deployment(target=placed(), replicas=1)
    free = LoadedDeployment(deployment, DEMAND, LoadLimits())
    assert free.stops == "memory capacity" and free.most == int(deployment.kv_tokens / 2200)
    slow = LoadedDeployment(deployment, DEMAND, LoadLimits(tpot=free.at(10).tpot))
    assert (slow.most, slow.stops) == (10, "TPOT limit")
    late = LoadedDeployment(deployment, DEMAND, LoadLimits(ttft=free.at(5).ttft))
    assert (late.most, late.stops) == (5, "TTFT limit")


def test_money_is_a_limit() -> None:
    one_device = choose(situation(limits=LoadLimits(dollars_per_hour=4.0)))
    assert all(one.device_count == 1 for one in one_device.kinds)
    with pytest.raises(ParameterError, match="limits: 'dollars_per_hour 1' is not allowed"):
        choose(situation(limits=LoadLimits(dollars_per_hour=1.0)))


def test_targets_are_where_the_plan_says() -> None:
    flash = OfferedPlacement(on="h100", tier=PlannedTier(name="3D DRAM", kv=0.5, memory=1e11, bandwidth=1e13))
    split = OfferedPlacement(on="h100", ffn_on="h100", ffn_link="nvlink4", batches=2)
    for offer, devices in ((flash, 1), (split, 2)):
        chosen = choose(situation(placements=(offer,), drafts=())).chosen
        assert chosen.device_count == devices and chosen.serves


def test_chains_and_published_pairs() -> None:
    chain = PairAcceptance(rate=0.5, sources=("a",)).guesses
    assert [tree.levels for tree in chain] == list(CHAINS) and chain[2].gained == pytest.approx(0.875)
    sync = published_acceptance("llama-3.1-8b", "eagle3-llama-3.1-8b")
    assert tokens_of_chain(sync.rate or 0, 3) == pytest.approx(2.2907, rel=1e-3)


@pytest.mark.parametrize(("draft", "published"), [("1b", 146.05), ("3b", 140.49)])
def test_inverted_acceptance_gives_the_published_speed(draft: str, published: float) -> None:
    """Of 6 guesses on one H200 in fp8, by the constants of TensorRT-LLM."""
    rate = published_acceptance("llama-3.1-70b", f"llama-3.2-{draft}").rate
    inputs = SyncInputs(
        target=RunModel(on="llama-3.1-70b@h200", engine="trtllm@h200", weights="fp8", kv="fp8"),
        draft=RunModel(on=f"llama-3.2-{draft}@h200", engine="trtllm@h200", weights="fp8", kv="fp8"),
        guesses=6,
        forwards=6,
        tokens=tokens_of_chain(rate or 0.0, 6),
        context=512,
    )
    assert inputs.predict("tok/s") == pytest.approx(published, rel=2e-3)


def test_a_trace_is_a_load() -> None:
    """Three minutes, of which one has 3 requests; each prompt of two blocks begins with the same one."""
    times = (0, 61, 62, 63, 130, 180)
    trace = [TimedRequest(1000.0 * t, 1000, 100 + i, [0, i + 1]) for i, t in enumerate(times)]
    load = recorded_load(trace)
    assert (load.mean, load.peak) == (6 / 180, 3 / 60) and load.shared == pytest.approx(5 * 512 / 6000)
    assert load.demand(1.0).longest == 1105 and load.demand(1.0).output == pytest.approx(102.5)
