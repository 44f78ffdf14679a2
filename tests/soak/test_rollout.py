"""Drafts swapped under load: each revision is a pool of its own, which a reloaded file of variants names; the one
before drains and ends. No request fails, and no token changes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from live import LiveServer
from rollouts import Files, Load, sample, until, worker
from support import SNIPPETS

from pilotfish.engine.pairs import resolve_pair

SWAPS, STREAMS, TOKENS = 20, 32, 48


def pool(directory: Path, revision: str) -> AbstractContextManager[str]:
    return worker("draft", f"ipc://{directory}/{revision}", "--pair=pycode", f"--revision={revision}")


def test_a_draft_is_swapped_under_load(tmp_path: Path) -> None:
    files, pair = Files(tmp_path), resolve_pair("pycode")
    with ExitStack() as others:
        pools = ExitStack()
        others.callback(lambda: pools.close())
        first = pools.enter_context(pool(tmp_path, "r0"))
        files.write_members([(first, False)])
        files.write_variants('name = "present"\ndraft = "r0"')
        options = ["--mode=async", f"--members={files.members}", f"--max-requests={STREAMS}", "--draft-optional"]
        target = others.enter_context(worker("target", f"ipc://{tmp_path}/target", "--pair=pycode", *options))
        with LiveServer(pair.target, target_pool=target, rollout=files.variants) as server:
            bodies = [{"prompt": text, "temperature": 0.8, "seed": seed} for seed, text in enumerate(SNIPPETS[:8])]
            load = Load(server, [{**body, "max_tokens": TOKENS} for body in bodies])
            load.learn()
            with ThreadPoolExecutor(STREAMS) as threads:
                streams = [threads.submit(load.stream, number) for number in range(STREAMS)]
                try:
                    for number in range(1, SWAPS + 1):
                        first, pools = swap(server, files, load, first, pools, pool(tmp_path, f"r{number}"), number)
                finally:
                    load.ended.set()
                for stream in streams:
                    stream.result()
    assert load.unequal == 0 and load.done > SWAPS * STREAMS
    print(json.dumps({"swaps": SWAPS, "requests": load.done, "unequal": load.unequal}))  # noqa: T201  # with -s


def swap(
    server: LiveServer,
    files: Files,
    load: Load,
    before: str,
    old: ExitStack,
    starting: AbstractContextManager[str],
    number: int,
) -> tuple[str, ExitStack]:
    """The next revision takes over from the one before, which drains and ends. Where it listens, and its pool."""
    pools = ExitStack()
    endpoint = pools.enter_context(starting)
    files.write_members([(before, False), (endpoint, False)])
    until("it is known", lambda: sample(server, "pilotfish_pool_ready", endpoint) == 1, server)
    until("it tells its revision", lambda: f'revision="r{number}"' in str(server.get("/metrics")[1]), server)
    files.write_variants(f'name = "present"\ndraft = "r{number}"')
    status, answer = server.post("/v1/rollout/reload", {})
    assert status == 200, answer
    files.write_members([(before, True), (endpoint, False)])
    until("it drafts", lambda: sample(server, "pilotfish_pool_sessions", endpoint) > 0, server)
    done = load.done
    until("requests end", lambda: load.done > done + STREAMS, server)
    files.write_members([(endpoint, False)])
    old.close()
    return endpoint, pools
