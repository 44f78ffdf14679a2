"""Engines whose drafts have other vocabularies: outputs are those without a draft, and what the drafts know helps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import inline_drafts
import pytest
from inline_drafts import draft_worker, patient_propose
from loopback import Loopback
from sizes import sized
from support import SETTINGS, SNIPPETS, assert_idle, drain, eventually, make_engine, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import DraftConfig
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.messages import MAPPED
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.drafts.draft_pool import make_worker
from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs import resolve_pair
from pilotfish.engine.sample import Sample
from pilotfish.errors import ModelError, ParameterError
from pilotfish.wire.pool_users import RemoteDrafter

#: The sampling settings, then grammars.
ASKED: tuple[dict[str, Any], ...] = (
    *SETTINGS,
    {"temperature": 0.9, "structured_outputs": Constraint.regex("[a-f ]{30,60}")},
    {"temperature": 0.0, "structured_outputs": Constraint.choice(["return", "return self", "Größe ☃"])},
)


@pytest.fixture(scope="module", params=[320, 900])
def another(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with fewer tokens than the target, or with more."""
    size = {"tokens": request.param, "vocab_size": request.param}
    return write_model(tmp_path_factory.mktemp("another"), "llama", seed=3, **size)


@contextmanager
def pool(monkeypatch: pytest.MonkeyPatch, target: Path, draft: Path, at: Path) -> Iterator[tuple[Engine, DraftMachine]]:
    """An engine whose draft is in a pool that knows the target's tokenizer, and waits for trees."""
    machines = list[DraftMachine]()

    def make(*arguments: Any) -> Any:
        worker = make_worker(*arguments)
        machines.append(worker.machine)
        return worker

    monkeypatch.setattr(inline_drafts, "make_worker", make)
    monkeypatch.setattr(RemoteDrafter, "propose", patient_propose(RemoteDrafter.propose))
    endpoint, of_draft = f"ipc://{at}/pool", EngineConfig(target=target, draft=draft, dtype="float32", kv_slots=8000)
    with (
        draft_worker(of_draft, endpoint, target_tokenizer=(target,)),
        make_engine(target, mode="async", drafter="lm", draft_pool=(endpoint,), nodes=16) as engine,
    ):
        yield engine, machines[0]


def generated(engine: Engine, asked: Sequence[dict[str, Any]], tokens: int = 40) -> list[Sample]:
    """Every setting over one of the prompts."""
    every = [SamplingParams(**{"max_tokens": tokens, "seed": i, **one}) for i, one in enumerate(asked)]
    samples = [engine.submit(SNIPPETS[i % len(SNIPPETS)], params)[0] for i, params in enumerate(every)]
    drain(engine)
    return samples


def test_outputs_are_those_without_a_draft(
    llama: Path, another: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(llama) as engine:
        expected = [sample.token_ids for sample in generated(engine, ASKED)]
    with pool(monkeypatch, llama, another, tmp_path) as (engine, machine):
        samples = generated(engine, ASKED)
        assert [sample.token_ids for sample in samples] == expected
        assert sum(sample.request.stats.draft_tokens for sample in samples) > 50
        assert machine.grown > 100
        (remote,) = engine.drafter.machine.pools
        assert MAPPED in remote.load.capabilities
        assert not remote.drops.occurred.keys() & {"dropped_nodes", "resyncs", "errors"}
        assert_idle(engine)


@pytest.mark.parametrize("setting", SETTINGS[:: sized(3, 1)], ids=str)
def test_a_target_under_other_ids_guesses_all_that_it_says(
    setting: dict[str, Any], llama: Path, other_ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step but the first and the last accepts a token at least, as the noise and the rules are mirrored."""
    with make_engine(llama) as engine:
        (expected,) = generated(engine, [setting])
    with pool(monkeypatch, llama, other_ids, tmp_path) as (engine, machine):
        (sample,) = engine.submit(SNIPPETS[0], SamplingParams(max_tokens=40, seed=0, **setting))
        stats = sample.request.stats
        while engine.busy:
            told = stats.accepted_tokens  # a request's last step sends no Commit
            engine.step()
        assert sample.token_ids == expected.token_ids
        assert stats.accepted_tokens >= stats.verify_steps - 2 > 2
        eventually(lambda: not len(machine.table))
        assert machine.used >= told and not machine.table.rewritten


def test_a_chat_goes_on_with_kv_that_is_known(
    llama: Path, other_ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool(monkeypatch, llama, other_ids, tmp_path) as (engine, machine):
        (first,) = generated(engine, [{"temperature": 0.8, "max_tokens": 150}])
        tokens = [*first.request.tokens, 7, 8, 9]
        engine.submit(tokens, SamplingParams(max_tokens=8, seed=3))
        drain(engine)
        (cached,) = [target.cached for target in machine._targets.values()]
        assert cached > 128 and not engine.drafter.machine.pools[0].drops.counts["resyncs"]


# -- what is refused


def test_a_trained_head_takes_no_other_vocabulary(llama: Path) -> None:
    head = resolve_pair("pycode", "eagle3").draft
    model = EngineConfig(target=head, dtype="float32", threads=1)
    config = DraftConfig(model=model, listen="ipc://nowhere", target_tokenizer=(llama,), target=llama)
    with pytest.raises(ParameterError, match=f"expected nothing: {head} is a trained head"):
        make_worker(config, Loopback(b"pool"))


def test_a_directory_without_a_tokenizer(llama: Path, tmp_path: Path) -> None:
    model = DraftConfig(model=EngineConfig(target=llama), listen="ipc://nowhere", target_tokenizer=(tmp_path,))
    with pytest.raises(ModelError, match=r"tokenizer: .* has no tokenizer\.json"):
        make_worker(model, Loopback(b"pool"))
