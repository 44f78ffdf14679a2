"""Several targets behind one server: a request whose target is lost goes on at another one, with the same tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attending import open_requests
from inline_targets import InlineTarget
from support import SNIPPETS, assert_idle, make_engine, until

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.routing.held_prefixes import routing_keys
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.members import Member, Members, write_members
from pilotfish.engine.targets.replica import RoutedTokens
from pilotfish.engine.targets.servers import LEAVING
from pilotfish.engine.targets.stream import Stream, Update, joined
from pilotfish.errors import EngineError, TargetUnavailable
from pilotfish.wire.serving import Delta, EngineRequest

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(max_tokens=40, seed=7, temperature=0.8, logprobs=1, n=2)
PACED = {"pace": "target=4ms"}


@dataclass
class World:
    """A server's engine, and targets that it is told of."""

    directory: Path
    model: Path
    server: ServerConfig
    targets: list[InlineTarget] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = AsyncEngine(EngineConfig(target=self.model), self.server)

    async def add(self, count: int = 1, **config: Any) -> None:
        self.targets += [InlineTarget(self.directory, self.model, **{**PACED, **config}) for _ in range(count)]
        await self.set_targets(self.members)
        await until(lambda: sum(replica.ready for replica in self.engine.health.replicas) == len(self.targets))

    @property
    def members(self) -> list[Member]:
        return [target.member for target in self.targets]

    async def set_targets(self, members: Sequence[Member]) -> None:
        await self.engine._fleet.set_members(members)

    def submit(self, snippets: Sequence[int] = range(8), params: SamplingParams = PARAMS) -> Stream:
        encode = self.engine.tokenizer.encode
        return self.engine.submit([EngineRequest(encode(SNIPPETS[i]), params) for i in snippets])

    def has(self, target: InlineTarget) -> int:
        """Requests that a target has, as the server knows."""
        return next(r.requests for r in self.engine.health.replicas if r.name == target.member.name)

    def lose(self, target: InlineTarget) -> None:
        self.targets.remove(target)
        target.close()


@pytest.fixture
def worlds(tmp_path: Path, llama: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def world(count: int, **server: Any) -> AsyncIterator[World]:
        world = World(tmp_path, llama, ServerConfig(replicas=0, **server))
        await world.engine.start()
        try:
            await world.add(count)
            yield world
            assert not open_requests(world.engine)
        finally:
            await world.engine.close()
            for target in world.targets:
                target.close()

    return world


async def whole(stream: Stream, *first: Update) -> dict[int, Delta]:
    """With what was taken of it before."""
    outputs = {update.index: update.delta for update in first}
    async with asyncio.timeout(120.0):
        async for update in stream:
            before = outputs.get(update.index)
            outputs[update.index] = update.delta if before is None else joined(before, update.delta)
    return outputs


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[int, Delta]:
    """Of all prompts, from an engine that nobody interrupts."""
    with make_engine(llama) as engine:
        outputs: dict[int, Delta] = {}
        for place, snippet in enumerate(SNIPPETS):
            for sample in engine.submit(snippet, PARAMS):
                sample.request_id = place
        while engine.busy:
            for delta in engine.step():
                index = delta.id * PARAMS.n + delta.index
                outputs[index] = delta if index not in outputs else joined(outputs[index], delta)
        return outputs


def assert_same(outputs: dict[int, Delta], expected: dict[int, Delta]) -> None:
    assert outputs.keys() == expected.keys()
    for index, delta in outputs.items():
        for name in ("tokens", "text", "ends", "logprobs", "seed", "finish"):
            assert getattr(delta, name) == getattr(expected[index], name), (index, name)


async def test_requests_go_on_elsewhere_when_their_target_is_lost(worlds: Any, expected: dict[int, Delta]) -> None:
    async with worlds(3) as world:
        outputs = asyncio.create_task(whole(world.submit()))
        for _ in range(2):
            first, moved = world.targets[0], world.engine.resumes
            await until(lambda first=first: world.has(first) > 0)
            await asyncio.sleep(0.03)
            world.lose(first)
            await until(lambda moved=moved: world.engine.resumes > moved)
        assert_same(await outputs, expected)
        await until(lambda: not world.targets[0].engine.busy)
        assert_idle(world.targets[0].engine)


@pytest.mark.parametrize("lost", ["sequence", "sent"])
async def test_after_lost_messages_requests_go_on(lost: str, worlds: Any, expected: dict[int, Delta]) -> None:
    async with worlds(0) as world:
        await world.add(pace="target=20ms")
        stream = world.submit()
        first = await anext(stream)
        attendance = world.engine._fleet.replicas[0].attendance
        setattr(attendance, lost, getattr(attendance, lost) + 1)
        outputs = await whole(stream, first)
        assert world.engine.resumes == 8
        assert_same(outputs, expected)


async def test_a_request_waits_for_a_target_that_may_take_over(worlds: Any, expected: dict[int, Delta]) -> None:
    """One that is there, but made other tokens, may not."""
    async with worlds(1) as world:
        outputs = asyncio.create_task(whole(world.submit()))
        stream = world.submit([0], replace(PARAMS, seed=None))
        await anext(stream)
        await world.add(fingerprint="other")
        world.lose(world.targets[0])
        await until(lambda: len(world.engine._waiting) == 9)
        assert world.engine.health.ready
        stream.abort()
        await asyncio.sleep(0.1)
        assert len(world.engine._waiting) == 8
        await world.add()
        assert_same(await outputs, expected)


async def test_it_does_not_wait_for_ever(worlds: Any) -> None:
    async with worlds(1, resume_timeout=0.3) as world:
        stream = world.submit()
        await anext(stream)
        await world.add(fingerprint="other")
        world.lose(world.targets[0])
        with pytest.raises(TargetUnavailable, match=r"no target took over within 0\.3 s"):
            await whole(stream)


async def test_a_stream_that_has_waited_long_enough_is_not_half_sent(worlds: Any) -> None:
    async with worlds(1) as world:
        stream = world.submit([0, 1])
        await until(lambda: all(request.begun for request in open_requests(world.engine)))
        await world.add(fingerprint="other")
        world.lose(world.targets[0])
        await until(lambda: len(world.engine._waiting) == 2)
        first, second = world.engine._waiting
        first.deadline, second.fingerprint = 0.0, "other"
        world.engine.look()
        with pytest.raises(TargetUnavailable, match="no target took over"):
            await whole(stream)
        assert world.has(world.targets[0]) == 0


@pytest.mark.parametrize("name", ["tokenizer", "config"])
async def test_a_target_of_another_model_is_not_used(worlds: Any, name: str) -> None:
    async with worlds(1) as world:
        status = world.targets[0].service._identity
        world.targets[0].service._identity = msgspec.structs.replace(status, **{name: "0123456789abcdef"})
        own = world.engine._own[name][:12]
        reason = f"{world.members[0].name}: its {name}, 0123456789ab, is not that of {world.engine.name}, {own}"
        await until(lambda: world.engine.health.reason == reason)


async def test_a_server_that_ends_lets_nobody_wait(worlds: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with worlds(1) as world:
        stream = world.submit()
        await anext(stream)
        world.lose(world.targets[0])
        await until(lambda: len(world.engine._waiting) == 8)
        await world.engine.close()
        with pytest.raises(TargetUnavailable, match="draining: the server is shutting down"):
            await whole(stream)
    assert [r.message for r in caplog.records if "requests that go on elsewhere: 8" in r.message]


async def test_nothing_goes_on_where_targets_do_not_say_whose_tokens_they_make(worlds: Any) -> None:
    async with worlds(0) as world:
        await world.add(2, fingerprint="")
        stream = world.submit()
        await anext(stream)
        await asyncio.sleep(0.1)
        world.lose(world.targets[0])
        with pytest.raises(TargetUnavailable, match=r"^t\d+: target_pool: "):
            await whole(stream)


async def test_a_request_that_three_targets_were_lost_with_gets_no_fourth(worlds: Any) -> None:
    async with worlds(4) as world:
        stream = world.submit([0], replace(PARAMS, max_tokens=1500))
        await anext(stream)
        for moves in range(1, 4):
            world.lose(next(target for target in world.targets if world.has(target)))
            await until(lambda moves=moves: world.engine.resumes == moves or not open_requests(world.engine))
        with pytest.raises(EngineError, match="request: 3 targets were lost while they had it, the last one because"):
            await whole(stream)


async def test_a_target_that_drains_gets_no_more_and_one_that_leaves_is_left(
    worlds: Any, expected: dict[int, Delta]
) -> None:
    async with worlds(0) as world:
        await world.add(2, pace="target=20ms")
        outputs, (one, other) = asyncio.create_task(whole(world.submit())), world.targets
        await until(lambda: world.has(one) and world.has(other))
        had = world.has(one)
        await world.set_targets([Member(one.member.endpoint, name=one.member.name, draining=True), other.member])
        assert world.has(one) == had
        late = world.submit([0])
        await anext(late)
        assert world.has(one) == had and world.engine.resumes == 0
        late.abort()
        assert_same(await outputs, expected)
        await until(lambda: len(world.engine.health.replicas) == 1)
        again = asyncio.create_task(whole(world.submit()))
        await until(lambda: world.has(other) == 8)
        await world.set_targets([one.member, other.member])
        await until(lambda: [replica.ready for replica in world.engine.health.replicas] == [True, True])
        await world.set_targets([one.member])
        assert world.engine.resumes == 8
        assert_same(await again, expected)
        await until(lambda: not other.engine.busy)


async def test_a_prompt_goes_where_its_beginning_was_computed(worlds: Any) -> None:
    async with worlds(2) as world:
        routed, params = world.engine.routed, replace(PARAMS, max_tokens=2)
        tokens = world.engine.tokenizer.encode("".join(SNIPPETS) * 2)[:200]
        keys, held = routing_keys(None, tokens), world.engine._fleet.routing.held
        await whole(world.engine.submit([EngineRequest(tokens, params)]))
        assert routed == RoutedTokens(200)
        await until(lambda: list(held.matched(keys).values()) == [3], 10.0)
        await whole(world.engine.submit([EngineRequest(tokens, params, session="another")]))
        assert routed == RoutedTokens(400, 192, 199)
        await whole(world.engine.submit([EngineRequest(tokens, params, "another")]))
        assert routed == RoutedTokens(600, 192, 199)
        (there,) = held.matched(keys)
        await world.set_targets([member for member in world.members if member.endpoint != there])
        assert held.matched(keys) == {}


async def test_targets_are_those_in_a_file(tmp_path: Path, llama: Path, expected: dict[int, Delta]) -> None:
    """One that leaves the file, and one that says that it shuts down, lose their requests to the other."""
    file = tmp_path / "members.json"
    async with AsyncExitStack() as stack:
        one, other = (InlineTarget(tmp_path, llama, pace="target=20ms") for _ in range(2))
        for target in (one, other):
            stack.callback(target.close)
        write_members(file, Members(targets=(one.member,)))
        engine = AsyncEngine(EngineConfig(target=llama, members=file))
        stack.push_async_callback(engine.close)
        await engine.start()
        await until(lambda: engine.health.ready)
        prompts = [engine.tokenizer.encode(snippet) for snippet in SNIPPETS]
        outputs = asyncio.create_task(whole(engine.submit([EngineRequest(prompt, PARAMS) for prompt in prompts])))
        await asyncio.sleep(0.1)
        write_members(file, Members(targets=(other.member,)))
        await until(lambda: engine.resumes == 8)
        assert [replica.name for replica in engine.health.replicas] == [other.member.name]
        write_members(file, Members(targets=(other.member, one.member)))
        await until(lambda: len(engine._fleet.taking) == 2)
        other.servers.leave()
        await until(lambda: engine.resumes == 16)
        assert engine.health.replicas[0].reason == f"{other.member.name}: {LEAVING}"
        assert {request.losses for request in open_requests(engine)} == {0}  # they cannot be why
        assert_same(await outputs, expected)


async def test_what_nobody_began_goes_anywhere_and_a_fleet_tells_of_itself(worlds: Any) -> None:
    async with worlds(1) as world:
        identity = world.engine.health.identity
        await world.add(fingerprint="other", kv_slots=1024)
        both = world.engine.health.identity
        assert (both.kv_slots, both.max_requests, both.longest) == (5120, 64, 1024)
        assert identity.kv_slots == 4096 and identity.longest > 1024
        told = [replica.told() for replica in world.engine.health.replicas]
        assert [one["free_slots"] for one in told] == [4096, 1024]
        assert [one["fingerprint"] for one in told] == ["equal", "other"]
        await world.set_targets([])
        assert not world.engine.health.ready and world.engine.health.reason == "target: there is none"
        with pytest.raises(TargetUnavailable, match="target: there is none"):
            world.submit()
