"""An output that another engine had begun goes on as if it had never been broken off, wherever that was."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from inline_drafts import inline_drafts
from msgspec.structs import replace
from sizes import sized
from support import SETTINGS, SNIPPETS, VOCAB, asked, assert_idle, make_engine, write_model

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.targets.stream import joined
from pilotfish.errors import ParameterError
from pilotfish.wire.serving import Delta, PartialOutput

ENGINES: dict[str, dict[str, Any]] = {
    "off": {"max_rows": 16, "max_requests": 8},
    "sync": {"mode": "sync", "drafter": "lm+ngram+suffix", "nodes": 8, "levels": 3, "width": 3},
    "async": {"mode": "async", "drafter": "lm", "nodes": 8},
    "small pool": {"mode": "sync", "drafter": "lm+ngram", "nodes": 8, "levels": 3, "width": 3, "kv_slots": 200},
}
CONSTRAINT = Constraint.regex(r"[a-f]{2,9}(-\d{3}){1,4}")
#: A prompt for each rule on logits, and for what else depends on the output so far.
ASKED = [SamplingParams(max_tokens=20, seed=seed, logprobs=1, **one) for seed, one in enumerate(SETTINGS)] + [
    SamplingParams(max_tokens=20, seed=9, stop=("e", "te"), min_tokens=12, temperature=1.0),
    SamplingParams(max_tokens=20, seed=9, stop=("returns", "self"), include_stop_str_in_output=True, temperature=1.0),
    SamplingParams(max_tokens=24, seed=11, structured_outputs=CONSTRAINT, temperature=1.0),
    SamplingParams(max_tokens=20, seed=12, n=3, temperature=1.0),
]


#: Every so many cuts of an output are tried, those of another prompt from another one on.
EVERY = sized(4, 1)


@dataclass(frozen=True)
class Output:
    """Of a request that nobody interrupted."""

    whole: Delta
    taken: list[str]  # [tokens + 1] the text that came with the first 0, 1, … tokens

    def rest(self, cut: int) -> Delta:
        """What has to come after its first `cut` tokens."""
        whole, text = self.whole, self.whole.text[len(self.taken[cut]) :]
        return replace(
            whole, tokens=whole.tokens[cut:], text=text, ends=whole.ends[cut:], logprobs=whole.logprobs[cut:]
        )


def generate(engine: Engine) -> dict[tuple[int, int], list[Delta]]:
    """Deltas of each output, by prompt and index, until the engine is idle."""
    deltas: dict[tuple[int, int], list[Delta]] = {}
    while engine.busy:
        for delta in engine.step():
            deltas.setdefault((delta.id, delta.index), []).append(delta)
    assert_idle(engine)
    return deltas


def output_of(deltas: Sequence[Delta]) -> Output:
    texts, text = [""], ""
    for delta in deltas:
        text += delta.text
        texts += [text] * len(delta.tokens)
        assert len(delta.tokens) <= 1
    return Output(reduce(joined, deltas), texts)


@pytest.fixture(scope="module")
def outputs(llama: Path) -> dict[tuple[int, int], Output]:
    """Without speculation, by the prompt's place in ASKED and the output's index."""
    with make_engine(llama) as engine:
        for place, params in enumerate(ASKED):
            for sample in engine.submit(SNIPPETS[place % 8], params):
                sample.request_id = place
        return {key: output_of(deltas) for key, deltas in generate(engine).items()}


@pytest.fixture(params=ENGINES)
def engine(
    request: pytest.FixtureRequest, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    with inline_drafts(monkeypatch), make_engine(llama, draft=draft, **ENGINES[request.param]) as engine:
        yield engine


def assert_same(deltas: Sequence[Delta], expected: Delta, *, begun: bool) -> None:
    """`begun`: whether the output had tokens before."""
    delta = reduce(joined, deltas)
    for name in ("tokens", "text", "ends", "logprobs", "prompt_logprobs", "finish"):
        assert getattr(delta, name) == getattr(expected, name), name
    assert [verified.resumed for verified in delta.verified] == [begun, *[False] * (len(delta.verified) - 1)]


def test_every_cut_of_every_kind_of_output(engine: Engine, outputs: dict[tuple[int, int], Output]) -> None:
    expected: dict[tuple[int, int], tuple[Delta, bool]] = {}
    for (place, index), output in outputs.items():
        for cut in range(place % EVERY, len(output.whole.tokens), EVERY):
            resumed = [PartialOutput(index, output.whole.tokens[:cut])]
            (sample,) = engine.add(asked(engine, SNIPPETS[place % 8], ASKED[place]), resumed=resumed)
            sample.request_id = len(expected)
            expected[sample.request_id, index] = output.rest(cut), cut > 0
    assert len(expected) > 150 / EVERY
    for key, deltas in generate(engine).items():
        rest, begun = expected.pop(key)
        assert_same(deltas, rest, begun=begun)
    assert not expected


def test_outputs_of_one_prompt_go_on_beside_each_other(engine: Engine, outputs: dict[tuple[int, int], Output]) -> None:
    place = len(ASKED) - 1
    for cuts in ({0: 7, 2: 3}, {1: 0, 2: 0}, {0: 5, 1: 5, 2: 5}):
        resumed = [PartialOutput(index, outputs[place, index].whole.tokens[:cut]) for index, cut in cuts.items()]
        for sample in engine.add(asked(engine, SNIPPETS[place % 8], ASKED[place]), resumed=resumed):
            sample.request_id = place
        for key, deltas in generate(engine).items():
            cut = cuts.pop(key[1])
            assert_same(deltas, outputs[key].rest(cut), begun=cut > 0)
        assert not cuts


def test_no_part_of_a_prompt_is_scored_twice(llama: Path) -> None:
    params = SamplingParams(max_tokens=6, seed=5, prompt_logprobs=1)
    with make_engine(llama, max_rows=8) as engine:
        (sample,) = engine.submit(SNIPPETS[2], params)
        ((_, deltas),) = generate(engine).items()
        assert len(deltas) > 8  # the prompt was scored in several steps
        for cut in range(1, len(deltas)):
            before = reduce(joined, deltas[:cut])
            resumed = [PartialOutput(0, before.tokens, len(before.prompt_logprobs))]
            (sample,) = engine.add(asked(engine, SNIPPETS[2], params), resumed=resumed)
            sample.request_id = 0
            ((_, after),) = generate(engine).items()
            assert_same(after, reduce(joined, deltas[cut:]), begun=bool(before.tokens))


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_models_with_windows(kind: str, tmp_path: Path) -> None:
    with make_engine(write_model(tmp_path, kind), kv_slots=400) as engine:
        params = SamplingParams(max_tokens=40, seed=3, temperature=0.9)
        engine.submit(SNIPPETS[2], params)
        ((_, deltas),) = generate(engine).items()
        output = output_of(deltas)
        for cut in range(0, 40, sized(5, 3)):
            engine.add(asked(engine, SNIPPETS[2], params), resumed=[PartialOutput(0, output.whole.tokens[:cut])])
            ((_, after),) = generate(engine).items()
            assert_same(after, output.rest(cut), begun=cut > 0)


WRONG: list[tuple[list[PartialOutput], dict[str, Any], str]] = [
    ([], {}, r"resumed: \[\] is not allowed; expected different outputs of 0 to 1"),
    ([PartialOutput(2)], {}, "resumed: .* different outputs of 0 to 1"),
    ([PartialOutput(1), PartialOutput(1)], {}, "resumed: .* different outputs of 0 to 1"),
    ([PartialOutput(0)], {"seed": None}, "seed: None"),
    ([PartialOutput(0, [5, VOCAB])], {}, f"resumed: {VOCAB} is not allowed; expected token ids 0 to {VOCAB - 1}"),
    ([PartialOutput(1), PartialOutput(0, [5] * 9)], {}, "resumed: .*output 0 of 9 tokens.* this ends at token 8"),
    ([PartialOutput(0, [5, 6, 7])], {"stop_token_ids": (6,)}, "resumed: .*output 0 of 3 tokens.* this ends at token 2"),
]


def test_what_cannot_be_resumed_is_refused_and_nothing_else_ends(llama: Path) -> None:
    with make_engine(llama) as engine:
        (other,) = engine.submit(SNIPPETS[0], SamplingParams(max_tokens=4, seed=1))
        for resumed, fields, message in WRONG:
            params = SamplingParams(**{"max_tokens": 8, "seed": 3, "n": 2, **fields})
            with pytest.raises(ParameterError, match=message):
                engine.add(asked(engine, SNIPPETS[0], params), resumed=resumed)
        generate(engine)
        assert len(other.token_ids) == 4
