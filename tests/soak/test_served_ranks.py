"""A server whose targets have ranks: one that ends takes its target with it, which comes back; no stream is lost where
there is another target."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from live import LiveServer
from support import SNIPPETS, eventually

#: Seconds that a target may take to come back.
RETURN = 120.0
OPTIONS: dict[str, Any] = {"mode": "sync", "tensor_parallel_size": 2, "nodes": 4, "levels": 2}


def completion(server: LiveServer, index: int, max_tokens: int = 200) -> tuple[int, Any]:
    body = {"model": "m", "prompt": SNIPPETS[index % len(SNIPPETS)], "max_tokens": max_tokens, "seed": index}
    status, answer = server.post("/v1/completions", {**body, "temperature": 0.8, "ignore_eos": True})
    return status, answer["choices"][0]["text"] if status == 200 else answer


def wait_for(happened: Callable[[], bool], what: str) -> None:
    eventually(happened, RETURN, pause=0.05, told=lambda: what)


def test_a_target_comes_back_after_one_of_its_ranks_has_ended(llama: Path, draft: Path) -> None:
    with LiveServer(llama, draft=draft, served_model_name="m", **OPTIONS) as server:
        before = completion(server, 1)
        assert before[0] == 200
        (target,), (rank,) = server.pids("target"), server.pids("target rank 1")
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: server.pids("target") not in ([], [target]), "a new target")
        wait_for(lambda: server.get("/ready")[0] == 200, "a target that serves")
        assert completion(server, 1) == before
        assert "target rank 1: was ended by signal 9 (Killed)" in server.log
        (target,), (rank,) = server.pids("target"), server.pids("target rank 1")
        os.kill(target, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{rank}").exists(), "the end of its rank")
        wait_for(lambda: server.get("/ready")[0] == 200, "a target that serves")
        assert completion(server, 1) == before
        (rank,) = server.pids("target rank 1")
    assert not Path(f"/proc/{rank}").exists()


def test_no_stream_is_lost_with_a_rank(llama: Path, draft: Path) -> None:
    with LiveServer(llama, draft=draft, served_model_name="m", replicas=2, **OPTIONS) as server:
        wait_for(lambda: len(server.pids("target rank 1")) == 2, "both targets' ranks")
        expected = [completion(server, index) for index in range(8)]
        assert {status for status, _ in expected} == {200}
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(completion, server, index) for index in range(8)]
            time.sleep(0.5)
            os.kill(server.pids("target rank 1")[0], signal.SIGKILL)
            assert [answer.result() for answer in answers] == expected
