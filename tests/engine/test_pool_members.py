"""Pools that come and go while a target serves: no request fails, and no token is another."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import inline_drafts
import numpy as np
import pytest
from inline_drafts import draft_worker, patient_propose
from inline_prefills import assert_nothing_left, prefill_worker
from support import VOCAB, assert_idle, drain, eventually, make_engine, run, step_until, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.handover import WHOLE
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.pools import remote_pools
from pilotfish.engine.pools.pool_members import PoolMembers
from pilotfish.engine.sample import Sample
from pilotfish.engine.targets import members as members_module
from pilotfish.engine.targets import status
from pilotfish.engine.targets.members import Member, Members, write_members
from pilotfish.errors import InputError, ParameterError
from pilotfish.wire.channel import ChannelThread
from pilotfish.wire.curve_keys import TargetKeys, new_key_pair
from pilotfish.wire.endpoints import Endpoint
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.wire.sockets import DialingChannel

TOKENS = 400
PROMPTS = [np.random.default_rng(seed).integers(1, VOCAB, 70 + 7 * seed).tolist() for seed in range(6)]


def params(seed: int, tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, temperature=0.8, ignore_eos=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "PERIOD", 0.005)


class Fleet:
    """A file of members, and pools that a test starts and stops."""

    def __init__(self, directory: Path, role: str) -> None:
        self.path, self._directory, self._role = directory / "members.json", directory, role
        self.set()

    def member(self, name: str, **fields: Any) -> Member:
        return Member(f"ipc://{self._directory}/{name}", name=name, **fields)

    def set(self, *members: Member) -> None:
        write_members(self.path, Members(**{self._role: members}))


def test_drafts_change_under_load(llama: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One revision after the other, with none at all between two of them; nobody notices but in speed."""
    monkeypatch.setattr(inline_drafts, "PATIENCE", 0.1)  # so that drafts come along
    monkeypatch.setattr(RemoteDrafter, "propose", patient_propose(RemoteDrafter.propose))
    seeds = range(len(PROMPTS))
    expected = run(make_engine(llama), PROMPTS, [params(seed) for seed in seeds])
    fleet = Fleet(tmp_path, "draft_pools")
    of_draft = EngineConfig(target=llama, draft=draft, mode="sync", kv_slots=8000)
    one, two, three = (fleet.member(name) for name in ("one", "two", "three"))
    fleet.set(one)
    with ExitStack() as first, ExitStack() as others:
        first.enter_context(draft_worker(of_draft, one.endpoint, revision="monday"))
        engine = others.enter_context(make_engine(llama, mode="async", drafter="lm", members=fleet.path))
        assert engine.remote is not None
        remote = engine.remote
        (old,) = remote.pools
        samples = [engine.submit(prompt, params(seed))[0] for prompt, seed in zip(PROMPTS[:5], seeds, strict=False)]
        step_until(engine, samples, "one")
        others.enter_context(draft_worker(of_draft, two.endpoint, revision="tuesday"))
        fleet.set(fleet.member("one", draining=True), two)
        eventually(lambda: [pool.ready for pool in remote.pools] == [True, True] and old.draining)
        step_until(engine, samples, "two")
        engine.step()
        moved = remote.drafter.machine.sessions.values()
        assert not old.sessions and [one.generation for one in moved] == [2] * 5
        told = [(pool.name, pool.revision) for pool in status.pools_of(engine)]
        assert told == [("one", "monday"), ("two", "tuesday")]
        eventually(lambda: old.load is not None and old.load.sessions == 0)  # as its operator sees
        first.close()
        fleet.set()
        eventually(lambda: not remote.pools)
        for _ in range(3):
            engine.step()
        samples += engine.submit(PROMPTS[5], params(5))
        others.enter_context(draft_worker(of_draft, three.endpoint))
        fleet.set(three)
        eventually(lambda: any(pool.ready for pool in remote.pools))
        step_until(engine, samples, "three")
        drain(engine)
        assert [sample.token_ids for sample in samples] == expected
        assert_idle(engine)


def test_prefill_pools_are_changed_while_prompts_come(llama: Path, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "prefill_pools")
    expected = run(make_engine(llama), PROMPTS, [params(seed, 8) for seed in range(len(PROMPTS))])
    options: dict[str, Any] = {"members": fleet.path, "prefill_threshold": "1", "mode": "off", "kv_slots": 4000}
    with ExitStack() as stack, make_engine(llama, **options) as engine:
        prefills, samples = engine.prefills, list[Sample]()
        assert prefills is not None and not prefills.pools
        workers = [
            stack.enter_context(prefill_worker(engine.config.of_prefill, fleet.member(name).endpoint))
            for name in ("one", "two")
        ]

        def serve(*members: Member) -> None:
            """A prompt, with these pools."""
            fleet.set(*members)
            wanted = [(member.label, member.draining, True) for member in members]
            eventually(lambda: [(pool.name, pool.draining, pool.ready) for pool in prefills.pools] == wanted)
            samples.extend(engine.submit(PROMPTS[len(samples)], params(len(samples), 8)))
            engine.step()

        one, two = fleet.member("one"), fleet.member("two")
        serve()
        serve(one)
        serve(fleet.member("one", draining=True), two)
        fleet.set()
        eventually(lambda: not prefills.pools)  # with a hand-over under way, or just come
        serve(one)
        serve()
        serve(two, one)
        drain(engine)
        assert [sample.token_ids for sample in samples] == expected
        reports = [sample.request.stats.handovers for sample in samples]
        assert [[report.pool for report in one] for one in reports[:5]] == [[], ["one"], ["two"], ["one"], []]
        outcomes = Counter(report.outcome for one in reports for report in one)
        assert outcomes[WHOLE] >= 2 and set(outcomes) <= {WHOLE, "gone"}, outcomes
        assert_nothing_left(workers, engine)


def test_a_file_that_cannot_be_used_ends_the_engine_before_it_loads(tmp_path: Path) -> None:
    (tmp_path / "members.json").write_text("{")
    with pytest.raises(InputError, match=r"^members: .*members\.json"):
        make_engine(tmp_path / "no model", members=tmp_path / "members.json")


def test_pools_that_a_target_has_no_use_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Drafts in mode off; prefill pools where each layer has a window."""
    windowed = write_model(tmp_path / "model", "mistral", sliding_window=16)
    gone = (Member("ipc:///nowhere/at/all"),)
    write_members(tmp_path / "members.json", Members(draft_pools=gone, prefill_pools=gone))
    with caplog.at_level("INFO"), make_engine(windowed, members=tmp_path / "members.json") as engine:
        assert engine.remote is None and engine.prefills is None
        assert len(run(engine, PROMPTS[:1], [params(0, 4)])[0]) == 4
    said = [record.getMessage() for record in caplog.records if "of no use" in record.getMessage()]
    assert said == [f"members: {role} pools are of no use to this target" for role in ("draft", "prefill")]


def test_other_threads_have_their_turns_as_before(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pools, "ANSWER", 0.01)
    nobody = f"ipc://{tmp_path}/nobody"
    pools = {"draft_pool": (nobody,), "prefill_pool": (f"{nobody}-either",)}
    shared = sys.getswitchinterval()  # of a process where engines of other tests may be open
    try:
        sys.setswitchinterval(0.005)
        with make_engine(llama, mode="async", drafter="lm", draft_optional=True, **pools):
            assert sys.getswitchinterval() < 0.005
        assert sys.getswitchinterval() == 0.005
    finally:
        sys.setswitchinterval(shared)


# -- dialling


class User:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def join(self, pool: DraftPool) -> None:
        self.told.append(("join", pool.name, pool.peer.decode()))

    def drain(self, pool: DraftPool, draining: bool) -> None:
        pool.draining = draining
        self.told.append(("drain", pool.name, str(draining)))

    def leave(self, pool: DraftPool) -> None:
        self.told.append(("leave", pool.name))


class Unknown(DialingChannel):
    """For a while some hosts have no address."""

    missing: tuple[str, ...] = ()

    def checked(self, endpoint: str, keys: TargetKeys | None) -> Endpoint:
        if endpoint in self.missing:
            raise ParameterError("draft_pool", endpoint, "a host that can be resolved")
        return super().checked(endpoint, keys)


@pytest.fixture
def dialled() -> Iterator[tuple[PoolMembers[DraftPool], User, Unknown]]:
    channel, user, own = Unknown((), b"run"), User(), None
    with closing(ChannelThread(channel)) as thread:
        thread.start(lambda _: None, lambda: None)
        yield PoolMembers(channel, thread, own, _pool, user), user, channel


def _pool(member: Member, peer: Peer) -> DraftPool:
    return DraftPool(member.label, peer)


A, B, C = (Member(f"ipc:///run/{name}", name=name) for name in "abc")


def test_what_changes_is_told_and_nothing_else(dialled: tuple[PoolMembers[DraftPool], User, Unknown]) -> None:
    pools, user, _ = dialled
    pools.begin([A])
    pools.set([A, B])
    pools.set([A, B])
    pools.set([Member(B.endpoint, name="b", draining=True), A])
    pools.set([B, A])
    pools.set([B, Member(A.endpoint, name="another")])
    pools.set([])
    assert user.told == [
        *(("join", "a", "0"), ("join", "b", "1"), ("drain", "b", "True"), ("drain", "b", "False")),
        *(("leave", "a"), ("join", "another", "2")),
        *(("leave", "b"), ("leave", "another")),
    ]


def test_hosts_without_an_address_are_tried_again(
    dialled: tuple[PoolMembers[DraftPool], User, Unknown], caplog: pytest.LogCaptureFixture
) -> None:
    pools, user, channel = dialled
    channel.missing = (A.endpoint, C.endpoint)
    for _ in range(3):
        pools.set([A, B, C])
    assert user.told == [("join", "b", "0")] and len(caplog.records) == 2
    channel.missing = (C.endpoint,)
    pools.set([A, B, C])
    pools.set([B])
    assert user.told[1:] == [("join", "a", "1"), ("leave", "a")] and len(caplog.records) == 2
    pools.set([B, C])
    assert len(caplog.records) == 3  # it was gone meanwhile
    with pytest.raises(ParameterError, match="resolved"):
        pools.begin([C])


def test_keys_of_members(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    own, theirs = new_key_pair(), new_key_pair()
    keyed = Member(f"ipc://{tmp_path}/pool", theirs.public)
    for key, joins in ((None, 0), (own, 1)):
        channel, user = DialingChannel((), b"run"), User()
        with closing(ChannelThread(channel)) as thread:
            thread.start(lambda _: None, lambda: None)
            PoolMembers(channel, thread, key, _pool, user).set([keyed])
        assert len(user.told) == joins
    assert "draft_key" in caplog.text and "as ipc://" in caplog.text and len(caplog.records) == 1
