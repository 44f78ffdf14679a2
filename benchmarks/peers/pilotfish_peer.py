"""Pilotfish as a contestant: the drafters of an engine of mode sync, or an engine of mode async as it is."""

from __future__ import annotations

import time
from functools import partial

from peers.protocol import Generated, LoadedPeer, Question, serve

from pilotfish.cli.bench.contestants import OFF, Contestant, check_drafter, contestant_of, drafting
from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_of
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine

#: Drafters by way.
DRAFTERS = {OFF: OFF, "sync": "lm", "sync lm+ngram": "lm+ngram", "sync ngram": "ngram"}
ASYNC = "async"


def load(text: str) -> LoadedPeer:
    """`text` is an engine's configuration, whose trees are verified in full."""
    engine = Engine(config_of(text, EngineConfig))
    quantized = "" if engine.config.quantization == "none" else f", weights {engine.config.quantization}"
    ways = {name: partial(_generate, engine, one) for name, one in _contestants(engine).items()}
    return LoadedPeer(ways, engine.precision.name + quantized, sampling=ways)


def _contestants(engine: Engine) -> dict[str, Contestant]:
    if engine.config.mode == "async":
        return {ASYNC: contestant_of(engine)}
    return {name: drafting(engine, drafter) for name, drafter in DRAFTERS.items()}


def _generate(engine: Engine, contestant: Contestant, question: Question) -> Generated:
    """EngineError if the drafter failed."""
    engine.use(contestant.drafter(), contestant.budget())
    params = SamplingParams(
        max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed, ignore_eos=True
    )
    began = time.perf_counter()
    [sample] = engine.submit(question.prompt, params)
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - began
    check_drafter(engine)
    return Generated(seconds=seconds, tokens=sample.token_ids, verify_steps=sample.request.stats.verify_steps)


if __name__ == "__main__":
    serve(load)
