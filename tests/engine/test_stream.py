"""Streams: nothing is lost or reordered, and a slow reader holds nobody up."""

import asyncio
from collections.abc import Awaitable

import pytest
from attending import STEP
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.engine.targets.stream import Stream, Update
from pilotfish.errors import TargetUnavailable
from pilotfish.wire.serving import Delta, Finish, StepReport, Verified


def update(index: int, token: int, *, last: bool = False, first: bool = False) -> tuple[Delta, StepReport]:
    finish = Finish("length", None) if last else None
    verified = [Verified(0.0, 1, 0, 0)]
    seed = 42 + index if first else None
    handovers = [HandOverReport(tokens=token)]
    delta = Delta(1, index, [token], chr(97 + token), [token + 1], verified, seed=seed, handovers=handovers)
    return replace(delta, finish=finish), STEP


def collect(stream: Stream) -> Awaitable[list[Update]]:
    async def all_of() -> list[Update]:
        return [update async for update in stream]

    return asyncio.wait_for(all_of(), 5.0)


@given(st.lists(st.integers(0, 2), min_size=3, max_size=40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_every_output_arrives_whole_and_in_order(order: list[int], reads: list[bool]) -> None:
    order = [0, 1, 2, *order]
    counts = [order.count(index) for index in range(3)]

    async def scenario() -> list[Update]:
        stream, given, got = Stream(1, 3, lambda: None), [0, 0, 0], []
        for index, read in zip(order, reads, strict=False):
            given[index] += 1
            stream.add(0, *update(index, given[index], first=given[index] == 1, last=given[index] == counts[index]))
            if read and stream._updates:
                got.append(await anext(stream))
        for index in order[len(reads) :]:
            given[index] += 1
            stream.add(0, *update(index, given[index], first=given[index] == 1, last=given[index] == counts[index]))
        return got + list(await collect(stream))

    got = asyncio.run(scenario())
    for index in range(3):
        own = [u.delta for u in got if u.delta.index == index]
        assert [token for delta in own for token in delta.tokens] == list(range(1, counts[index] + 1))
        assert sum(len(delta.verified) for delta in own) == counts[index]
        assert [report.tokens for delta in own for report in delta.handovers] == list(range(1, counts[index] + 1))
        assert [delta.seed for delta in own if delta.seed is not None] == [42 + index]
        assert [delta.finish is not None for delta in own] == [False] * (len(own) - 1) + [True]
    assert sum(len(u.steps) for u in got) == len(order)


@pytest.mark.anyio
async def test_a_reader_that_sleeps_finds_one_update_an_output() -> None:
    stream = Stream(1, 1, lambda: None)
    for token in range(20):
        stream.add(0, *update(0, token, last=token == 19))
    (only,) = await collect(stream)
    assert only.delta.tokens == list(range(20)) and only.delta.text == "abcdefghijklmnopqrst"


@pytest.mark.anyio
async def test_what_came_before_an_error_is_given_first() -> None:
    stream = Stream(1, 1, lambda: None)
    stream.add(0, *update(0, 1))
    stream.fail(TargetUnavailable("target: gone"))
    assert (await anext(stream)).delta.tokens == [1]
    with pytest.raises(TargetUnavailable, match="target: gone"):
        await anext(stream)


@pytest.mark.anyio
async def test_a_waiting_reader_learns_of_an_error() -> None:
    stream = Stream(1, 1, lambda: None)
    asyncio.get_running_loop().call_later(0.01, stream.fail, TargetUnavailable("target: gone"))
    with pytest.raises(TargetUnavailable):
        await collect(stream)


@pytest.mark.anyio
async def test_outputs_count_through_all_prompts() -> None:
    stream = Stream(2, 2, lambda: None)
    for request, index in ((8, 1), (7, 0), (8, 0), (7, 1)):
        stream.add(request - 7, Delta(request, index, [index], "a", [1], [], finish=Finish("length", None)), STEP)
    found = [(u.index, u.delta.id, u.delta.index) for u in await collect(stream)]
    assert found == [(3, 8, 1), (0, 7, 0), (2, 8, 0), (1, 7, 1)]
