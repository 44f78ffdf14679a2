"""Two pools guess for each sequence, one of them through a map; both are short of room, and so is the target; one is
killed and comes back. Outputs are those of mode off."""

from pathlib import Path
from time import sleep
from typing import Any

import pytest
from permuted_models import permuted
from sizes import sized
from support import assert_idle, eventually, make_engine
from workers import PARAMS, PROMPTS, Start, endpoint_in

from pilotfish.core.drafting.messages import MAPPED
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.engine.engine import Engine

STREAMS = sized(40, 100)
#: Tokens that KV has room for: less than the streams have, in a pool less than the target runs at a time.
ROOM, POOLS_ROOM = 300, 150


def mapped_of(engine: Engine) -> DraftPool:
    return next(pool for pool in engine.remote.pools if pool.can(MAPPED))


@pytest.mark.usefixtures("quick")
def test_outputs_stay(pool: Start, llama: Path, draft: Path, expected: list[list[int]], tmp_path: Path) -> None:
    other_ids = permuted(llama, tmp_path / "other")
    here, there = endpoint_in(tmp_path), f"ipc://{tmp_path}/mapped"
    room = ("--kv-slots", str(POOLS_ROOM))

    def start_mapped() -> Any:
        return pool(other_ids, "--target-tokenizer", str(llama), "--listen", there, *room)

    pool(draft, *room)
    mapped = start_mapped()
    options: dict[str, Any] = {"draft_pool": (here, there), "draft_pools_each": 2, "nodes": 4, "kv_slots": ROOM}
    with make_engine(llama, mode="async", drafter="lm", **options) as engine:
        samples = [s for one in zip(PROMPTS[:STREAMS], PARAMS[:STREAMS], strict=True) for s in engine.submit(*one)]
        before = _killed_half_way(engine, mapped, start_mapped)
        while engine.busy:
            engine.step()
            sleep(0.005)
        assert [sample.token_ids for sample in samples] == expected[:STREAMS]
        assert sum(sample.request.stats.preemptions for sample in samples)
        assert sum(pool.drops.occurred.get("pauses", 0) for pool in engine.remote.pools)
        assert all(pool.score.accepted > 0 for pool in engine.remote.pools)
        assert mapped_of(engine).score.accepted > before
        assert_idle(engine)


def _killed_half_way(engine: Engine, mapped: Any, start_mapped: Any) -> int:
    """Once guesses were accepted of the mapped pool it is killed, and comes back; how many were."""
    eventually(lambda: len([pool for pool in engine.remote.pools if pool.ready]) == 2)
    pool = mapped_of(engine)
    while not pool.score.accepted:
        engine.step()
        sleep(0.01)
    mapped.kill()
    eventually(lambda: not pool.ready)
    accepted = pool.score.accepted
    for _ in range(3):
        engine.step()
    start_mapped()
    eventually(lambda: pool.ready)
    return accepted
