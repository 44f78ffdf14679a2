"""Constraints of the corpus on the bundled pair: outputs that end are valid, others begin so, and no guess changes one.
All of them, and through a server, in tests/soak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from constraint_checks import is_valid, may_become_valid
from sizes import sized
from support import make_engine

from pilotfish.bench.corpus import Entry, Schema, entries
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs import resolve_pair
from pilotfish.engine.sample import Sample

PAIR = resolve_pair("pycode")
ENTRIES = list(entries())[:: sized(21, 7)]
TEMPERATURES = (0.0, 1.0)


def outputs(engine: Engine, temperature: float) -> list[Sample]:
    samples = [sample for i, entry in enumerate(ENTRIES) for sample in _submit(engine, entry, i, temperature)]
    while engine.busy:
        engine.step()
    return samples


def _submit(engine: Engine, entry: Entry, seed: int, temperature: float) -> list[Sample]:
    params = SamplingParams(max_tokens=512, seed=seed, temperature=temperature, structured_outputs=entry.constraint)
    return engine.submit(f'"""{entry.name}"""\nvalue = ', params)


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[float, list[Sample]]]:
    """Outputs of the target without a draft, by temperature."""
    with make_engine(PAIR.target, kv_slots=32768) as engine:
        yield {temperature: outputs(engine, temperature) for temperature in TEMPERATURES}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_ends_is_valid_and_most_does(alone: dict[float, list[Sample]], temperature: float) -> None:
    whole = [sample.finish_reason is FinishReason.STOP for sample in alone[temperature]]
    for entry, sample, ended in zip(ENTRIES, alone[temperature], whole, strict=True):
        assert ended or sample.finish_reason is FinishReason.LENGTH
        judge = is_valid if ended else may_become_valid
        assert judge(entry, sample.text.rstrip("\ufffd")), (entry.name, sample.text)
    assert sum(whole) >= 0.8 * len(whole)


def test_guesses_change_nothing_and_two_tokens_come_at_a_time(alone: dict[float, list[Sample]]) -> None:
    schemas = [isinstance(entry.source, Schema) for entry in ENTRIES]
    with make_engine(PAIR.target, draft=PAIR.draft, mode="sync", drafter="lm+ngram", kv_slots=32768) as engine:
        for temperature in TEMPERATURES:
            guessed = outputs(engine, temperature)
            assert [one.token_ids for one in guessed] == [one.token_ids for one in alone[temperature]]
            of_schemas = [one for one, is_schema in zip(guessed, schemas, strict=True) if is_schema]
            steps = sum(one.stats()["verify_steps"] for one in of_schemas)
            assert sum(len(one.token_ids) for one in of_schemas) >= 2 * steps
