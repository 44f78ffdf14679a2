"""Asynchronous drafts never change the output: == in float32. Bad connections are in tests/chaos/test_channels.py."""

from pathlib import Path

from live_drafts import drafted
from sizes import sized
from support import SETTINGS, SNIPPETS, hits_of, make_engine
from test_lossless import MIXED, alone, generate, params


def test_every_prompt_with_many_settings(llama: Path, draft: Path) -> None:
    with drafted(llama, [draft]) as d:
        hits = hits_of(d.workers[0].machine.table)
        for shift in range(0, len(SETTINGS), sized(2, 1)):
            cases = [(i, (i + shift) % len(SETTINGS)) for i in range(len(SNIPPETS))]
            assert generate(d.engine, cases, together=True) == [alone(llama)[case] for case in cases]
    d.settle()
    drops, drafts = d.drafter.machine.pools[0].drops.counts, d.workers[0].machine
    assert drops["dropped_nodes"] == drops["malformed_frames"] == 0
    assert sum(hits) > 20 and drafts.used > 20 and drops["resyncs"] == drops["errors"] == 0


def test_what_is_guessed_for_changes_on_the_way(llama: Path, draft: Path) -> None:
    """As a guard does that cuts a variant, and lets it go on."""
    with drafted(llama, [draft]) as d:
        samples = [d.engine.submit(SNIPPETS[i], params((i, j)))[0] for i, j in MIXED]
        for step in range(10**6):
            if not d.engine.busy:
                break
            sample = samples[step % len(samples)]
            if sample.finish_reason is None:
                d.engine.revise(sample, (0, None, 2)[step // 3 % 3])
            d.engine.step()
        assert [sample.token_ids for sample in samples] == [alone(llama)[case] for case in MIXED]
    d.settle()


def test_int8_kv(llama: Path, draft: Path) -> None:
    plain = generate(make_engine(llama, kv_dtype="int8"), MIXED, together=False)
    with drafted(llama, [draft], kv_dtype="int8", pace="target=4ms") as d:  # time for a level in each step
        hits = hits_of(d.workers[0].machine.table)
        assert generate(d.engine, MIXED, together=True) == plain
    d.settle()
    assert any(hits)
