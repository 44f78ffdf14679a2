"""What a draft tells targets beyond Trees, and what it makes of what they tell."""

import logging
from pathlib import Path

import msgspec
import pytest
from rig import HELLO, Rig, Told, make_open, prompt

from pilotfish.core.drafting import messages
from pilotfish.core.drafting.draft_machine import BUSY, LONG, PAUSED, REPORT
from pilotfish.core.drafting.draft_sessions import IDLE
from pilotfish.core.drafting.level_choice import WHOLE_CHUNK
from pilotfish.core.peers.fields import Echo, Error
from pilotfish.wire.channel import Received

TARGET, OTHER = b"target", b"other"


def able(*capabilities: str) -> messages.Hello:
    return msgspec.structs.replace(HELLO, capabilities=list(capabilities))


def test_any_version_of_the_range_will_do(llama: Path) -> None:
    rig = Rig(llama)
    rig.say(TARGET, msgspec.structs.replace(HELLO, version=9, capabilities=["telepathy", messages.PAUSES]))
    rig.turns()
    load = rig.heard(TARGET, messages.Load)[-1]
    assert load.version == 1 and {messages.PAUSES, messages.ERRORS} <= set(load.capabilities) and load.slots == 2000
    rig.say(OTHER, msgspec.structs.replace(HELLO, version=9, oldest=2))
    rig.turns()
    assert [refusal.reason for refusal in rig.heard(OTHER, messages.Refuse)] == [
        "protocol version 2 to 9; this draft speaks 1"
    ]


def test_echoes_go_back(llama: Path) -> None:
    rig = Rig(llama)
    rig.now = 50.0
    rig.say(TARGET, msgspec.structs.replace(HELLO, echo=Echo(7_000_000)))
    rig.turns()
    rig.now = 50.3
    rig.turns()
    first, second = (load.echo for load in rig.heard(TARGET, messages.Load)[-2:])
    assert first == Echo(50_000_000, 7_000_000, 0) and second == Echo(50_300_000, 7_000_000, 300_000)


# -- long prompts


def test_progress_of_a_long_prompt(llama: Path) -> None:
    rig, tokens = Rig(llama), prompt(2 * WHOLE_CHUNK + 10)
    rig.say(TARGET, able(messages.PROGRESS), make_open(tokens, session=3))
    rig.rest()
    told = [(one.session, one.read) for one in rig.heard(TARGET, messages.Progress)]
    assert told == [(3, WHOLE_CHUNK), (3, 2 * WHOLE_CHUNK)]
    assert rig.heard(TARGET, messages.Tree)


def test_nobody_gets_progress_unasked(rig: Rig) -> None:
    rig.say(TARGET, make_open(prompt(2 * WHOLE_CHUNK)))
    rig.rest()
    assert not rig.heard(TARGET, messages.Progress) and rig.heard(TARGET, messages.Tree)


def test_targets_hear_of_a_long_level_before_it_runs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(llama)
    grow, slow, said = rig.worker.grower.grow, 2 * LONG, list[list[float]]()

    def slowly(level: object) -> object:
        said.append([load.busy_ms for load in rig.heard(TARGET, messages.Load)])
        rig.now += slow
        return grow(level)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.worker.grower, "grow", slowly)
    rig.say(TARGET, HELLO, make_open(prompt(3 * WHOLE_CHUNK)))
    rig.turns(3)
    busy = pytest.approx(1000 * BUSY * slow)
    assert said == [[0.0, 0.0], [0.0, busy], [0.0, busy]]  # not busy as soon as it has time for a word


# -- pauses


def test_a_commit_ends_a_pause(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(20)))
    rig.say(TARGET, messages.Pause(1, 1))
    rig.rest()
    assert not told.listen()
    told.commit([4])
    rig.rest()
    assert told.listen()


def test_a_paused_session_loses_its_kv_first(llama: Path) -> None:
    rig = Rig(llama, slots=300, cached=False)
    rig.say(TARGET, HELLO, make_open(prompt(100, 1), session=1), make_open(prompt(100, 2), session=2))
    rig.rest()
    rig.say(TARGET, messages.Pause(1, 1), make_open(prompt(150, 3), session=3))
    rig.rest()
    evicted = {session.key.number for session in rig.table if session.evicted}
    assert evicted == {1} and not rig.heard(TARGET, messages.Pause)


def crowded(llama: Path, *hello: messages.Hello) -> Rig:
    """One tenant holds nearly all slots when another comes, which gets its share."""
    rig = Rig(llama, slots=400, cached=False)
    for peer, greeting in zip((TARGET, OTHER), hello, strict=True):
        rig.say(peer, greeting, tenant=peer.decode())
    rig.say(TARGET, make_open(prompt(300), wanted=8), tenant="target")
    rig.rest()
    rig.say(OTHER, make_open(prompt(150, 1), wanted=8), tenant="other")
    return rig


def test_a_session_in_use_that_loses_its_kv_is_paused_and_goes_on(llama: Path) -> None:
    rig = crowded(llama, able(messages.PAUSES), able())
    rig.rest()
    assert rig.heard(TARGET, messages.Pause) == [messages.Pause(1, 1)]
    commits = [messages.Commit(1, 1, 300 + n, [n], 8) for n in range(3)]
    rig.say(TARGET, *commits[:2], tenant="target")
    rig.now += REPORT
    rig.rest()
    assert not rig.heard(TARGET, messages.Resume)  # there is no room
    rig.say(OTHER, msgspec.structs.replace(make_open([1, 2]), generation=2), tenant="other")
    rig.now += REPORT
    rig.rest()
    assert rig.heard(TARGET, messages.Resume) == [messages.Resume(1, 1)]
    rig.heard(TARGET, messages.Tree)
    rig.say(TARGET, commits[2], tenant="target")
    rig.rest()
    assert rig.heard(TARGET, messages.Tree)[0].base_len == 303 and not rig.heard(TARGET, messages.Resync)


def test_without_room_it_is_tried_now_and_then(llama: Path) -> None:
    rig = crowded(llama, able(messages.PAUSES), able())
    until = rig.now + 4 * PAUSED
    while rig.now < until:
        rig.now += REPORT
        rig.say(TARGET, able(messages.PAUSES), tenant="target")
        rig.say(OTHER, HELLO, tenant="other")
        rig.rest()
        for session in rig.table:
            session.touched = rig.now  # both are in use
    assert 1 <= len(rig.heard(TARGET, messages.Resume)) <= 5


def test_who_knows_no_pauses_gets_none(llama: Path) -> None:
    rig = crowded(llama, able(), able())
    rig.rest()
    rig.now += REPORT
    rig.rest()
    assert not rig.heard(TARGET, messages.Pause) and not rig.heard(TARGET, messages.Resume)


def test_idle_sessions_just_rest(llama: Path) -> None:
    rig = Rig(llama, slots=400, cached=False)
    rig.say(TARGET, able(messages.PAUSES), make_open(prompt(300), wanted=8))
    rig.rest()
    rig.now += IDLE + 0.1
    rig.say(TARGET, make_open(prompt(200, 1), session=2, wanted=8))
    rig.rest()
    assert rig.table.check() is None and [s.evicted for s in rig.table] == [True, False]
    assert not rig.heard(TARGET, messages.Pause)


# -- errors


def test_a_target_is_told_of_frames_of_no_use(llama: Path) -> None:
    rig = Rig(llama)
    rig.say(TARGET, able(messages.ERRORS))
    rig.say(OTHER, able())
    for peer in (TARGET, OTHER):
        for frame in (b"\xc1", msgspec.msgpack.encode({"type": "open"}), msgspec.msgpack.encode({"type": "greeting"})):
            rig.channel.inbox.append(Received(peer, frame))
    rig.turns()
    told = [(error.code, error.about) for error in rig.heard(TARGET, Error)]
    assert told == [("malformed", ""), ("unknown_type", "greeting")] and not rig.heard(OTHER, Error)
    assert [target.malformed for target in rig.worker.machine._targets.values()] == [2, 2]


def test_an_error_is_logged_once_and_never_answered(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(llama)
    rig.say(TARGET, able(messages.ERRORS), *[Error("ids", "tree", "ids do not rise", 3)] * 5)
    with caplog.at_level(logging.WARNING):
        rig.turns()
    (record,) = caplog.records
    assert record.getMessage() == f"{TARGET.hex()} could not use a frame: ids: ids do not rise"
    assert not rig.heard(TARGET, Error)
