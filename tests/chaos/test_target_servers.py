"""A target whose servers die or fall silent: others notice nothing, and nothing is left. tests/engine/test_servers.py
has whatever else may happen between them, without sockets and engines."""

import secrets
from contextlib import closing
from pathlib import Path

import pytest
from attending import AttendingServer
from inline_targets import InlineTarget
from sizes import sized
from support import SNIPPETS, assert_idle, eventually, make_engine, run

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.wire import serving
from pilotfish.wire.sockets import DialingChannel

LONG = SamplingParams(max_tokens=1800, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=40, seed=7, temperature=0.8, ignore_eos=True)


@pytest.mark.parametrize("how", sized(["silent"], ["killed", "silent"]))
def test_a_server_that_is_gone_loses_its_requests_and_nobody_else_any(
    how: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SERVER_SILENCE", 1.5)
    with make_engine(llama) as plain:
        prompt = plain.tokenizer.encode(SNIPPETS[0])
        (tokens,) = run(plain, [prompt], [SHORT])
    with closing(InlineTarget(tmp_path, llama, pace="target=4ms")) as target:
        channels = [DialingChannel([target.member.endpoint], secrets.token_bytes(8)) for _ in range(2)]
        gone, there = map(AttendingServer, channels)

        def heard(server: AttendingServer) -> AttendingServer:
            server.hear()
            return server

        with closing(gone.channel), closing(there.channel):
            gone.join()
            there.join()
            for number in (1, 2):
                gone.submit(number, [5, 6, number], LONG)
            eventually(lambda: bool(heard(gone).deltas(2)))
            if how == "killed":
                gone.channel.close()
            there.submit(1, prompt, SHORT)
            assert there.output(1) == tokens
            eventually(lambda: heard(there) and not target.engine.worker.scheduler.running)
            there.submit(2, prompt, SHORT)
            assert there.output(2) == tokens and there.whole
            if how == "silent":
                eventually(lambda: not heard(gone).whole)  # it knows that its requests are over
                gone.submit(3, prompt, SHORT)
                assert gone.output(3) == tokens
    assert not target.service._samples
    assert_idle(target.engine)
