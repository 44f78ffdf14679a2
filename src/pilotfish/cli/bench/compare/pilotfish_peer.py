"""Pilotfish as a contestant: the drafters of an engine of mode sync, or an engine of mode async as it is."""

from functools import partial

from pilotfish.cli.bench.compare.peer import Generated, LoadedPeer, Question
from pilotfish.cli.bench.contestants import OFF, Contestant, contestant_of, drafting
from pilotfish.cli.bench.workload import Job, Prompt
from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_of
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine

#: Drafters by way.
DRAFTERS = {OFF: OFF, "sync": "lm", "sync lm+ngram": "lm+ngram", "sync ngram": "ngram"}


def load(text: str) -> LoadedPeer:
    """`text` is an engine's configuration, whose trees are verified in full."""
    engine = Engine(config_of(text, EngineConfig))
    if engine.config.mode == "async":
        contestants = {"async": contestant_of(engine)}
    else:
        contestants = {name: drafting(engine, drafter) for name, drafter in DRAFTERS.items()}
    ways = {name: partial(_generate, engine, one) for name, one in contestants.items()}
    return LoadedPeer(ways, engine.precision.name, sampling=ways)


def _generate(engine: Engine, contestant: Contestant, question: Question) -> Generated:
    """EngineError if the drafter failed."""
    params = SamplingParams(max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed)
    run = contestant.run(engine, [Job(Prompt("", question.prompt), "", params).whole], 1)
    return Generated(seconds=run.seconds, tokens=run.outputs[0], verify_steps=run.total("verify_steps"))
