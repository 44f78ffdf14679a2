"""Drafts of other vocabularies: a target's own model under other ids guesses as itself; others guess what they say of
tokens that both have, and their KV is that of what they read."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from rig import HELLO, IDENTITY, SAMPLINGS, SMALL, Rig, Told, loaded, make_open, prompt
from support import SNIPPETS, VOCAB, RowSampling, eventually, hits_of, sampling_of, write_model

from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_sessions import DraftSession
from pilotfish.core.drafting.messages import Refuse, RequestSampling, Resync
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.core.trees.lookahead import Lookahead
from pilotfish.engine.drafts.draft_pool import mapped_vocabularies
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.model.sampling import draw

TARGET = b"target"


class MappedRig(Rig):
    """A draft in `directory` that serves targets with the tokenizer in `target`, whose digest is `digest` here. What it
    guesses is held against `target`'s own model."""

    def __init__(self, directory: Path, target: Path) -> None:
        tokenizer = load_tokenizer(directory)
        vocab_size, ended = loaded(directory).model.config.vocab_size, ExitStack()
        (vocabulary,) = mapped_vocabularies([target], tokenizer, vocab_size, ended).values()
        self.map = vocabulary.map
        identity = DraftIdentity(IDENTITY.model, "of the draft", {}, mapped={IDENTITY.tokenizer: vocabulary})
        super().__init__(directory, vocab_size=len(tokenizer), identity=identity)
        self.directory, self.ended = target, ended

    def close(self) -> None:
        self.ended.close()


@pytest.fixture(scope="module", params=[400, 700])
def another(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of fewer tokens than the target's, or of more."""
    size = {"tokens": request.param, "vocab_size": request.param}
    return write_model(tmp_path_factory.mktemp("another"), "llama", seed=3, **size)


@pytest.fixture
def rig(other_ids: Path, llama: Path) -> Iterator[MappedRig]:
    with closing(MappedRig(other_ids, llama)) as rig:
        rig.say(TARGET, HELLO)
        yield rig


# -- the target's own model, under other ids


@pytest.mark.parametrize("name", SAMPLINGS)
def test_noise_and_rules_are_those_of_the_targets_ids(rig: MappedRig, name: str) -> None:
    """Hits and misses: each level is what the target's own model says, noise and chances included."""
    told, rng = Told(rig, make_open(prompt(20), sampling=SAMPLINGS[name], wanted=100)), np.random.default_rng(1)
    hits = hits_of(rig.table)
    for step in range(8):
        rig.turns(int(rng.integers(1, 4)))
        told.listen()
        paths = sorted(told.guesses(), key=len)
        path = paths[-1 if step % 2 else 0]
        told.commit([path, [*path, 77], [int(rng.integers(VOCAB))]][step % 3])
    rig.rest()
    assert told.listen() and rig.session().tokens == told.tokens
    assert rig.session().inputs == [rig.map.counterpart(token) for token in told.tokens] != told.tokens
    assert set(hits) == {True, False} and not rig.table.rewritten
    assert not rig.heard(TARGET, Refuse) and not rig.heard(TARGET, Resync)


def test_grammars_are_followed_by_the_targets_tokenizer(rig: MappedRig, llama: Path) -> None:
    """What is guessed is what the target's own mask allows."""
    tokenizer = load_tokenizer(llama)
    opened = make_open(prompt(8), sampling=RequestSampling(temperature=1.0))
    rig.say(TARGET, replace(opened, constraint=Constraint.regex("[ab]{40}")))
    rig.worker._take_all(0.0)
    eventually(lambda: rig.session().grammar_state() is not None)
    rig.rest()
    guessed = {token for tree in rig.trees(TARGET, 1) for token in tree.tokens}
    assert guessed and all(set(tokenizer.decode([token])) <= {"a", "b"} for token in guessed)


# -- other tokenizers


def children_of(rig: MappedRig, session: DraftSession, leaf: int) -> dict[int, float]:
    """Chances of what is likely after a node, computed from nothing."""
    inputs = [*session.inputs, *map(rig.map.counterpart, session.tree.path_tokens(leaf))]
    count, executor = len(inputs), TorchExecutor(rig.executor.model, 2048)
    rows = SequenceRows(0, inputs, np.arange(count, dtype=np.int32), NO_NODES, kept=[count - 1])
    row = RowSampling(session.params, session.seed, session.length_at(leaf), session.edits_at(leaf))
    sampling = replace(sampling_of([row], rig.worker.grower.children), vocabularies=[rig.map.shared])
    tokens, chances = draw(executor.forward([rows]), [], sampling)
    assert chances is not None
    return dict(zip(tokens[0].tolist(), chances[0].tolist(), strict=True))


@pytest.mark.parametrize("name", ["greedy", "warm", "penalized"])
def test_trees_are_what_the_model_says_of_what_it_reads(another: Path, llama: Path, name: str) -> None:
    """After hits, misses and texts that it writes otherwise than the target."""
    with closing(MappedRig(another, llama)) as rig:
        tokenizer, rng = load_tokenizer(llama), np.random.default_rng(5)
        rig.say(TARGET, HELLO)
        text = tokenizer(SNIPPETS[2])["input_ids"]
        told, hits = Told(rig, make_open(text[:-12], sampling=SAMPLINGS[name])), hits_of(rig.table)
        for step in range(12):
            rig.turns(int(rng.integers(1, 4)))
            session = rig.session()
            nodes = session.tree.likeliest(200)
            path = session.tree.path_tokens(nodes[-1]) if step % 3 < 2 and nodes else []
            told.commit(path if step % 3 and path else [*path, text[step - 12]])
        for piece in pieces_of_one(another, llama):
            told.commit([piece])
            rig.turns(1)
        rig.turns(4)
        session = rig.session()
        assert session.inputs != session.tokens and len(session.inputs) > 10
        assert load_tokenizer(another).decode(session.inputs) == tokenizer.decode(session.tokens)
        trees, known = rig.trees(TARGET, 1), set(rig.map.shared.ids.tolist())
        assert {token for tree in trees for token in tree.tokens} <= known
        assert max(tree.base_len for tree in trees) == len(told.tokens) == len(session.tokens)
        _check_children(rig, session)
        assert bool(rig.table.rewritten) == (len(load_tokenizer(another)) > VOCAB)
        assert set(hits) == {True, False}


def pieces_of_one(draft: Path, target: Path) -> list[int]:
    """A word that the draft has a token for, and the target several; none where there is none."""
    ours, theirs = load_tokenizer(draft), load_tokenizer(target)
    words = [f" {ours.decode([token]).strip()}" for token in range(1, len(ours))]
    found = (theirs(word)["input_ids"] for word in words if len(ours(word)["input_ids"]) == 1)
    return next((pieces for pieces in found if len(pieces) > 1), [])


def _check_children(rig: MappedRig, session: DraftSession) -> None:
    checked = 0
    for node in (session.tree.root, *session.tree.expanded):
        own = {t: session.tree.score(n) - session.tree.score(node) for t, n in session.tree._children[node].items()}
        expected = children_of(rig, session, node)
        kept = {t: c for t, c in expected.items() if session.tree.score(node) + c > Lookahead.FLOOR}
        assert own == pytest.approx(kept, abs=1e-4)
        checked += 1
    assert checked > 3


def test_targets_of_both_kinds_share_levels(other_ids: Path, llama: Path) -> None:
    """One that needs no map, one that does: each is given its own ids, with masks of its own."""
    with closing(MappedRig(other_ids, llama)) as rig:
        rig.say(TARGET, HELLO)
        rig.say(b"own", replace(HELLO, tokenizer="of the draft"))
        told = Told(rig, make_open(prompt(10), sampling=SAMPLINGS["penalized"]))
        own = make_open([rig.map.counterpart(token) for token in prompt(10)], sampling=RequestSampling(temperature=0.0))
        rig.say(b"own", own)
        rig.rest()
        assert told.listen()
        rows = SequenceRows(0, prompt(10), np.arange(10, dtype=np.int32), NO_NODES, kept=[9])
        likeliest = loaded(llama).forward([rows])[0].topk(SMALL.children).indices.tolist()
        assert rig.trees(b"own", 1)[0].tokens == [rig.map.counterpart(token) for token in likeliest]
