"""Drafts swapped under load: each revision is a pool of its own, which a reloaded file of variants names; the one
before drains and ends. No request fails, and no token changes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from live import LiveServer
from support import SNIPPETS

from pilotfish.pairs import resolve_pair

SWAPS, STREAMS, TOKENS = 20, 32, 48
#: Seconds that a pool has to be known, to be used, and to drain.
PATIENCE = 60.0


@contextmanager
def worker(role: str, endpoint: str, *options: str) -> Iterator[str]:
    """A process of the role, which ends in order; where it listens."""
    fixed = ["--pair=pycode", "--dtype=float32", "--threads=1", "--kv-slots=65536", "--json", f"--listen={endpoint}"]
    command = [sys.executable, "-m", "pilotfish", role, *fixed, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "it serves"
            yield endpoint
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def pool(directory: Path, revision: str) -> AbstractContextManager[str]:
    return worker("draft", f"ipc://{directory}/{revision}", f"--revision={revision}")


class Fleet:
    """The files that a server follows."""

    def __init__(self, directory: Path) -> None:
        self.members, self.variants = directory / "members.json", directory / "rollout.toml"

    def write_members(self, *pools: tuple[str, bool]) -> None:
        """Endpoints, and whether each drains."""
        drafts = [{"endpoint": endpoint, "draining": draining} for endpoint, draining in pools]
        text = json.dumps({"targets": [], "draft_pools": drafts, "prefill_pools": []})
        fresh = self.members.with_suffix(".new")
        fresh.write_text(text)
        fresh.chmod(0o600)
        fresh.replace(self.members)

    def write_variants(self, revision: str) -> None:
        holdout = '[[variant]]\nname = "holdout"\nmode = "off"\nholdout = true\nshare = 0.1\n'
        self.variants.write_text(f'{holdout}[[variant]]\nname = "present"\ndraft = "{revision}"\n')


def until(what: str, holds: Callable[[], bool], server: LiveServer) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, f"{what}: {server.log[-2000:]}"
        time.sleep(0.1)


class Load:
    """Streams that ask for the same few outputs again and again, each of which has only one answer."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        bodies = [{"prompt": text, "temperature": 0.8, "seed": seed} for seed, text in enumerate(SNIPPETS[:8])]
        self.bodies = [{**body, "max_tokens": TOKENS, "return_token_ids": True} for body in bodies]
        self.expected = [self.tokens({**body, "speculation": {"mode": "off"}}) for body in self.bodies]
        self.done = self.unequal = 0
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def tokens(self, body: dict[str, object]) -> list[int]:
        status, answer = self.server.post("/v1/completions", body)
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def stream(self, number: int) -> None:
        while not self.ended.is_set():
            which = number % len(self.bodies)
            equal = self.tokens(self.bodies[which]) == self.expected[which]
            with self._lock:
                self.done, self.unequal = self.done + 1, self.unequal + (not equal)
            number += 1


def test_a_draft_is_swapped_under_load(tmp_path: Path) -> None:
    fleet, pair = Fleet(tmp_path), resolve_pair("pycode")
    with ExitStack() as others:
        pools = ExitStack()
        others.callback(lambda: pools.close())
        first = pools.enter_context(pool(tmp_path, "r0"))
        fleet.write_members((first, False))
        fleet.write_variants("r0")
        options = ["--mode=async", f"--members={fleet.members}", f"--max-requests={STREAMS}", "--draft-optional"]
        target = others.enter_context(worker("target", f"ipc://{tmp_path}/target", *options))
        with LiveServer(pair.target, target_pool=target, rollout=fleet.variants) as server:
            load = Load(server)
            with ThreadPoolExecutor(STREAMS) as threads:
                streams = [threads.submit(load.stream, number) for number in range(STREAMS)]
                try:
                    for number in range(1, SWAPS + 1):
                        first, pools = swap(server, fleet, load, first, pools, pool(tmp_path, f"r{number}"), number)
                finally:
                    load.ended.set()
                for stream in streams:
                    stream.result()
    assert load.unequal == 0 and load.done > SWAPS * STREAMS
    print(json.dumps({"swaps": SWAPS, "requests": load.done, "unequal": load.unequal}))  # noqa: T201  # with -s


def swap(
    server: LiveServer,
    fleet: Fleet,
    load: Load,
    before: str,
    old: ExitStack,
    starting: AbstractContextManager[str],
    number: int,
) -> tuple[str, ExitStack]:
    """The next revision takes over from the one before, which drains and ends. Where it listens, and its pool."""
    pools = ExitStack()
    endpoint = pools.enter_context(starting)
    fleet.write_members((before, False), (endpoint, False))
    until("it is known", lambda: sample(server, "pilotfish_pool_ready", endpoint) == 1, server)
    until("it tells its revision", lambda: f'revision="r{number}"' in str(server.get("/metrics")[1]), server)
    fleet.write_variants(f"r{number}")
    status, answer = server.post("/v1/rollout/reload", {})
    assert status == 200, answer
    fleet.write_members((before, True), (endpoint, False))
    until("it drafts", lambda: sample(server, "pilotfish_pool_sessions", endpoint) > 0, server)
    done = load.done
    until("requests end", lambda: load.done > done + STREAMS, server)
    fleet.write_members((endpoint, False))
    old.close()
    return endpoint, pools


def sample(server: LiveServer, name: str, pool: str) -> float:
    _, text = server.get("/metrics")
    lines = [line for line in str(text).splitlines() if line.startswith(f"{name}{{") and f'"{pool}"' in line]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else -1.0
