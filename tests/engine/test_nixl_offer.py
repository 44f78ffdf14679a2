"""Prefill pools that offer their memory over NIXL: equal outputs where it is installed, one line where it is not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from inline_prefills import inline_prefills
from support import VOCAB, drain, make_engine, run

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import PrefillConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.prefills import prefill_pool
from pilotfish.errors import ParameterError
from pilotfish.kv.nixl import nixl_installed
from pilotfish.wire.sockets import ListeningChannel


def test_nixl_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_pool, "nixl_installed", lambda: False)
    config = PrefillConfig(model=EngineConfig(target=tmp_path / "nowhere"), listen="tcp://127.0.0.1:0", nixl=True)
    expected = r"nixl: True is not allowed; expected NIXL, which is not installed: pip install 'pilotfish\[nixl\]'"
    with (
        closing(ListeningChannel(config.listen)) as channel,
        pytest.raises(ParameterError, match=expected),
        prefill_pool.serving(config, channel),
    ):
        pass


@pytest.mark.skipif(not nixl_installed(), reason="NIXL is not installed: pip install 'pilotfish[nixl]'")
def test_outputs_are_equal_over_nixl(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (2, 65, 300, 450)
    prompts = [[(7 * length + i) % VOCAB for i in range(length)] for length in lengths]
    params = [SamplingParams(max_tokens=8, seed=5, temperature=0.8)] * len(prompts)
    with make_engine(llama) as engine:
        expected = run(engine, prompts, params)
    given = {"prefill_workers": 1, "prefill_threshold": "1", "prefill_transports": ("nixl",)}
    with inline_prefills(monkeypatch, nixl=True), make_engine(llama, **given) as engine:
        samples = [s for prompt, one in zip(prompts, params, strict=True) for s in engine.submit(prompt, one)]
        drain(engine)
    assert [sample.token_ids for sample in samples] == expected
    reports = [report for sample in samples for report in sample.request.stats.handovers]
    assert [(report.transport, report.tokens) for report in reports] == [("nixl", length - 1) for length in lengths]
