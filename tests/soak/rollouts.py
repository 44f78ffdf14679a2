"""Processes and files of a rollout under load: targets, draft pools, the files that a server follows, clients."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live import LiveServer
from support import eventually

#: Seconds that a pool has to be known, to be used, and to drain.
PATIENCE = 120.0


@contextmanager
def worker(role: str, endpoint: str, *options: str) -> Iterator[str]:
    """A process of the role, which ends in order; where it listens."""
    fixed = ["--dtype=float32", "--threads=1", "--kv-slots=65536", "--json", f"--listen={endpoint}"]
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


class Files:
    """That a server and its targets follow."""

    def __init__(self, directory: Path) -> None:
        self.members, self.variants = directory / "members.json", directory / "rollout.toml"

    def write_members(self, pools: Sequence[tuple[str, bool]], targets: Sequence[tuple[str, bool]] = ()) -> None:
        """Endpoints, and whether each drains."""
        drafts, verifiers = ([{"endpoint": e, "draining": drains} for e, drains in each] for each in (pools, targets))
        fresh = self.members.with_suffix(".new")
        fresh.write_text(json.dumps({"targets": verifiers, "draft_pools": drafts, "prefill_pools": []}))
        fresh.chmod(0o600)
        fresh.replace(self.members)

    def write_variants(self, *variants: str) -> None:
        """Beside a holdout."""
        holdout = '[[variant]]\nname = "holdout"\nmode = "off"\nholdout = true\nshare = 0.1\n'
        self.variants.write_text(holdout + "".join(f"[[variant]]\n{variant}\n" for variant in variants))


def until(what: str, holds: Callable[[], bool], server: LiveServer) -> None:
    eventually(holds, PATIENCE, pause=0.1, told=lambda: f"{what}: {server.log[-3000:]}")


def sample(server: LiveServer, name: str, pool: str) -> float:
    """-1: there is none."""
    _, text = server.get("/metrics")
    lines = [line for line in str(text).splitlines() if line.startswith(f"{name}{{") and f'"{pool}"' in line]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else -1.0


def tokens_of(server: LiveServer, body: dict[str, Any], **headers: str) -> tuple[int, ...]:
    status, answer = server.post("/v1/completions", {**body, "return_token_ids": True}, **headers)
    assert status == 200, answer
    return tuple(answer["choices"][0]["token_ids"])


class Load:
    """Streams that ask for the same outputs again and again. `expected`: the outputs that each may have."""

    def __init__(self, server: LiveServer, bodies: Sequence[dict[str, Any]]) -> None:
        self.server, self.bodies = server, bodies
        self.expected: list[set[tuple[int, ...]]] = [set() for _ in bodies]
        self.headers: dict[str, str] = {}
        self.done = self.unequal = 0
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def learn(self) -> None:
        """What the targets that serve now write without speculation."""
        for body, outputs in zip(self.bodies, self.expected, strict=True):
            outputs.add(tokens_of(self.server, {**body, "speculation": {"mode": "off"}}))

    def stream(self, number: int) -> None:
        while not self.ended.is_set():
            which = number % len(self.bodies)
            equal = tokens_of(self.server, self.bodies[which], **self.headers) in self.expected[which]
            with self._lock:
                self.done, self.unequal = self.done + 1, self.unequal + (not equal)
            number += 1
