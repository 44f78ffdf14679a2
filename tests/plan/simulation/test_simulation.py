"""Runs in virtual time: whatever guesses, outputs are the target's; times are those of the devices."""

from unittest.mock import Mock

import pytest
from support import RandomDrafter

from pilotfish.config.hardware.cost import ForwardLoad
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.plan.events import VirtualClock
from pilotfish.plan.simulation import run
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, drawn_acceptance
from pilotfish.plan.simulation.models import Cost, Replay, ReplayedModel
from pilotfish.plan.simulation.setup import HostCosts, LoadItem, Setup, SimulatedLoad, Speculation, closed_load
from pilotfish.workers.target import TargetWorker

TRACE = drawn_acceptance(0.7, sequences=8, prompt=16, output=64)
MODES = ("off", "sync", "async")


def flat(seconds: float) -> Cost:
    return lambda _: seconds


def setup(mode: str, draft: float = 0.002, **fields: object) -> Setup:
    speculation = {"speculation": Speculation(mode=mode, adaptive=False)}  # type: ignore[arg-type]
    return Setup(target=flat(0.010), draft=flat(draft), **speculation | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("ngrams", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_the_traces_tokens(mode: str, ngrams: bool) -> None:
    speculation = Speculation(mode=mode, ngrams=ngrams)  # type: ignore[arg-type]
    simulation = run.Simulation(setup(mode, speculation=speculation), TRACE)
    simulation.play(closed_load(5, 2, 40, 3))
    for request, sequence in zip(simulation.requests, (0, 1, 2, 0, 1), strict=True):
        first = int(TRACE.first[sequence])
        assert request.output == TRACE.tokens[first : first + 40].tolist()


def test_off_takes_a_forward_for_each_token() -> None:
    simulated = run.simulate(setup("off"), TRACE, closed_load(6, 2, 50, 8))
    assert simulated.seconds == pytest.approx(3 * 50 * 0.010)
    assert simulated.tokens_per_step == 1
    assert [r.first - r.came for r in simulated.requests] == pytest.approx([0.010] * 6)


@pytest.mark.parametrize(("levels", "delay", "seconds"), [(3, 0.0, 0.016), (2, 0.003, 0.020)])
def test_sync_waits_for_its_draft(levels: int, delay: float, seconds: float) -> None:
    """Each step takes the levels of its tree and a forward, and the way to a draft elsewhere and back; its first level
    reads the prompt."""
    speculation = Speculation(mode="sync", levels=levels, adaptive=False)
    simulated = run.simulate(setup("sync", delay=delay, speculation=speculation), TRACE, closed_load(1, 1, 60, 8))
    whole = [step for step in simulated.steps[0] if step.depth == levels]
    assert len(whole) > 10
    assert [step.ended - step.began for step in whole] == pytest.approx([seconds] * len(whole))


def chain(trace: AcceptanceTrace, guesses: int, output: int) -> int:
    """Steps of an output in which a chain of the likeliest guesses is verified each time."""
    position = steps = 0
    while position < output:
        span = slice(position, position + guesses)
        right = (trace.guesses[span, 0] == trace.tokens[span]).tolist()
        position += [*right, False].index(False) + 1
        steps += 1
    return steps


@pytest.mark.parametrize("guesses", [1, 2, 5])
def test_steps_of_chains_are_those_counted_by_hand(guesses: int) -> None:
    """A tree of one leaf a level and as many nodes as levels is a chain while first guesses are likeliest."""
    sure = drawn_acceptance(0.7, sequences=1, prompt=16, output=64)
    sure.log_chances[:] = [0.0] + [-9.0] * (sure.width - 1)
    speculation = Speculation(mode="sync", nodes=guesses, levels=guesses, width=1, adaptive=False)
    simulated = run.simulate(setup("sync", speculation=speculation), sure, closed_load(1, 1, 60, 1))
    assert simulated.stats[0].verify_steps in (chain(sure, guesses, 60), chain(sure, guesses, 60) + 1)


def test_async_hides_its_draft() -> None:
    sync, hidden = (run.simulate(setup(mode), TRACE, closed_load(4, 2, 40, 8)) for mode in ("sync", "async"))
    assert {round(step.ended - step.began, 9) for step in hidden.steps[0]} == {0.010}
    assert hidden.tokens_per_step < sync.tokens_per_step
    assert hidden.tokens_per_second > sync.tokens_per_second
    assert 0 < hidden.pools[0] <= hidden.seconds + 0.1


def test_distance_costs_tokens_but_never_time() -> None:
    near, far = (run.simulate(setup("async", delay=delay), TRACE, closed_load(4, 2, 40, 8)) for delay in (0.0, 0.02))
    off = run.simulate(setup("off"), TRACE, closed_load(4, 2, 40, 8))
    assert off.tokens_per_second <= far.tokens_per_second < near.tokens_per_second


def test_targets_share_a_pool() -> None:
    """Four targets that share a slow pool get fewer guesses than one that has it alone, and more with another pool."""

    def per_step(targets: int, pools: int) -> float:
        many = setup("async", draft=0.008, targets=targets, pools=pools)
        simulated = run.simulate(many, TRACE, closed_load(targets, targets, 40, 8))
        assert [len(steps) > 0 for steps in simulated.steps] == [True] * targets
        return simulated.tokens_per_step

    assert per_step(1, 1) > per_step(4, 2) > per_step(4, 1) > 1
    assert per_step(4, 4) == pytest.approx(per_step(1, 1), rel=0.01)  # one each


def test_requests_come_when_they_come() -> None:
    load = SimulatedLoad([LoadItem(0, 10), LoadItem(1, 10, at=1.0)])
    first, second = run.simulate(setup("off"), TRACE, load).requests
    assert (second.came - first.came, second.ended - second.came) == pytest.approx((1.0, 0.1))


def test_the_rule_leaves_guessing_where_it_does_not_pay() -> None:
    """A target whose forwards cost in proportion to their rows: there is nothing to gain."""
    by_rows: Cost = lambda load: 0.010 * load.rows  # noqa: E731
    costly = Setup(target=by_rows, draft=flat(0.010), speculation=Speculation(mode="sync"))
    simulated = run.simulate(costly, TRACE, closed_load(16, 8, 60, 8))
    late = simulated.steps[0][len(simulated.steps[0]) // 2 :]
    assert sum(step.nodes for step in late) < 0.2 * sum(step.sequences for step in late)


def test_the_host_costs_what_it_says() -> None:
    host = HostCosts(step=0.001, sequence=0.0001, node=0.00001)
    seconds = host.of_target(flat(0.010))(ForwardLoad(rows=24, sequences=4))
    assert seconds == pytest.approx(0.010 + 0.001 + 0.0004 + 0.0002)


@pytest.mark.parametrize("mode", MODES)
def test_a_later_round_counts_alone(mode: str) -> None:
    load = closed_load(2, 2, 40, 8)
    first, second = (run.simulate(setup(mode), TRACE, load, rounds) for rounds in (1, 2))
    assert len(second.requests) == 2 and sum(request.tokens for request in second.requests) == 80
    assert second.seconds == pytest.approx(first.seconds, rel=0.2)
    assert sum(step.committed for step in second.steps[0]) == 80


# -- a step whose commit fails


SLOTS, CONTEXT = 200, 120


def six_requests(nodes: int) -> tuple[TargetWorker, list[Request]]:
    """Of which four run at a time, with prompts of 3 to 48 tokens, in forwards of 40 rows."""
    clock, replay = VirtualClock(), Replay(drawn_acceptance(0.7, sequences=6, output=32))
    executor = ReplayedModel(replay, lambda _: 1.0, clock, SLOTS, CONTEXT)
    scheduler = Scheduler(SlotPool(SLOTS), max_rows=40, max_requests=4)
    worker = TargetWorker(executor, scheduler, RandomDrafter(1 << 15), FixedBudget(nodes, 3), clock)
    prompts, params = [[1] * (3 + 9 * n) for n in range(6)], SamplingParams(max_tokens=25, temperature=0.0)
    requests = [Request(n, one, params, replay.add(n, len(one)), frozenset(), CONTEXT) for n, one in enumerate(prompts)]
    for request in requests:
        worker.scheduler.add(request)
    return worker, requests


@pytest.mark.parametrize("nodes", [0, 8])
def test_a_step_without_guesses_tells_nothing_of_acceptance(nodes: int) -> None:
    """Who shared its guesses: the sequences that sampled, where prompts left rows for any and the budget asked."""
    worker, _ = six_requests(nodes)
    shared = [{commit.sharing for commit in worker.step()} for _ in range(6)]
    assert shared[0] == {0} and shared[-1] == ({4} if nodes else {0})


@pytest.mark.parametrize("broken", ["detector", "counts", "walk"])
def test_a_failed_commit_ends_its_requests_and_frees_all_slots(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four requests the second cannot commit; two wait."""
    closed: list[int] = []
    worker, requests = six_requests(8)
    monkeypatch.setattr(worker.drafter.drafter, "close", lambda request: closed.append(request.id))
    worker.step()
    if broken == "detector":
        requests[1].stop_detector = Mock(side_effect=[False, False, ZeroDivisionError])
    elif broken == "counts":
        monkeypatch.setattr(requests[1].stats, "count", lambda *_: 1 / 0)
        requests[1].stop_ids = frozenset(range(1 << 15))  # it has ended when its counts fail
    else:
        monkeypatch.setattr("pilotfish.core.scheduling.scheduler.walk", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        while worker.scheduler.busy:
            worker.step()
    worker.scheduler.check()
    assert requests[1].finish_reason is (FinishReason.STOP if broken == "counts" else FinishReason.ABORT)
    assert {r.finish_reason for r in (requests[0], *requests[2:4])} == {FinishReason.ABORT}
    assert worker.scheduler.pool.num_free == SLOTS and len(worker.scheduler.waiting) == 2
    assert sorted(closed) == [0, 1, 2, 3]
