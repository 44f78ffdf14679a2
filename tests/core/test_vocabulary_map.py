"""Maps between vocabularies: what a draft reads is the target's text, what it may guess are tokens that both have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sizes import sized
from vocabularies import BYTES, read, said, sayings, table, tables

from pilotfish.core.drafting import vocabulary_map
from pilotfish.core.drafting.vocabulary import clash, difference
from pilotfish.core.drafting.vocabulary_map import UNREAD, MappedText, TokenTable, Unshared, VocabularyMap


@pytest.fixture(autouse=True)
def _short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_map, "WINDOW", 6)


@given(target=tables(whole=False), draft=tables(whole=False))
def test_tokens_that_are_shared_stand_for_the_same(target: TokenTable, draft: TokenTable) -> None:
    one = VocabularyMap(target, draft)
    ids, columns = one.shared.ids.tolist(), one.shared.columns.tolist()
    assert ids == sorted(set(ids)) and len(set(columns)) == len(columns) == len(ids)
    for token, counterpart in zip(ids, columns, strict=True):
        assert said(target, [token]) == said(draft, [counterpart])
        assert one.counterpart(token) == counterpart and one.pieces(token) == [counterpart]
    of_both = {*target.plain.values()} & {*draft.plain.values()}
    assert len(ids) == len(of_both) + len({*target.added.values()} & {*draft.added.values()})


@given(data=st.data(), target=tables(), draft=tables())
def test_what_is_read_is_the_targets_text(data: st.DataObject, target: TokenTable, draft: TokenTable) -> None:
    """However it grows: tokens that were guessed, and others."""
    one = VocabularyMap(target, draft)
    tokens = data.draw(sayings(target))
    text = MappedText(one, tokens)
    inputs = text.inputs
    for _ in range(6):
        assert read(one, draft, inputs, tokens) == said(target, tokens)
        before, more = list(inputs), data.draw(sayings(target))
        guessed = [token for token in more if token in one.shared.ids][: data.draw(st.integers(0, 4))]
        text.follow(guessed)
        assert inputs == [*before, *(one.counterpart(token) for token in guessed)]
        before = list(inputs)
        kept = text.read(more)
        assert inputs[:kept] == before[:kept] and inputs is text.inputs
        assert kept == len(before) or not one.nested
        tokens += [*guessed, *more]


@given(data=st.data(), target=tables(whole=False), draft=tables(whole=False))
def test_what_cannot_be_read_is_another_token_each(data: st.DataObject, target: TokenTable, draft: TokenTable) -> None:
    """A byte that the draft has no token for."""
    one = VocabularyMap(target, draft)
    tokens = data.draw(sayings(target))
    text = MappedText(one, tokens)
    for place in range(0, len(tokens), 3):
        text.read(tokens[place : place + 3])
    whole = [*tokens, *tokens]
    spelled = {byte for piece in draft.plain.values() if len(piece) == 1 for byte in piece}
    wrong = zip(read(one, draft, text.inputs, whole), said(target, whole), strict=True)
    assert all(here == there or (here == ord("?") and there not in spelled) for here, there in wrong)


def test_the_end_of_the_text_is_written_as_the_tokenizer_writes_it() -> None:
    target, draft = table(BYTES), table([*BYTES, b"ab", b" ab", b"abab"])
    one = VocabularyMap(target, draft)
    assert not one.nested
    text = MappedText(one, target.encode("a b"))
    assert text.inputs == draft.encode("a b")
    assert text.read(target.encode("a")) == 3 and text.read(target.encode("b")) == 3
    assert text.inputs == draft.encode("a bab")
    text.follow(target.encode("a"))  # guessed: stays in pieces until something is not
    assert text.inputs == [*draft.encode("a bab"), *draft.encode("a")]
    assert text.read(target.encode("b")) == 3 and text.inputs == draft.encode("a babab")


def test_only_the_end_is_written_anew() -> None:
    """However long the text is."""
    asked = list[str]()
    own = table([*BYTES, b"ab"])

    def encode(text: str) -> list[int]:
        asked.append(text)
        return list(own.encode(text))

    target, draft = table(BYTES), table([*BYTES, b"ab"], encode=encode)
    text = MappedText(VocabularyMap(target, draft), target.encode("ab " * 1000))
    asked.clear()
    for _ in range(50):
        text.read(target.encode("a"))
        text.read(target.encode("b"))
    assert max(map(len, asked)) <= 2 * 6 + 2
    assert text.inputs == own.encode("ab " * 1000 + "ab" * 50)


def test_text_does_not_reach_across_a_special_token() -> None:
    """One that only the target has is text like any other."""
    target, draft = table(BYTES, ["<s>", "<tool>"]), table([*BYTES, b"ab"], ["<s>"])
    begin, tool = target.added
    one = VocabularyMap(target, draft)
    (own,) = draft.added
    a, b = target.encode("ab")
    text = MappedText(one, [begin, a, begin, b])
    assert text.inputs == [own, *draft.encode("a"), own, *draft.encode("b")]
    text.read([tool])
    unread = [UNREAD] * len("<tool>")  # none of its letters is in this vocabulary
    assert text.inputs == [own, *draft.encode("a"), own, *draft.encode("b"), *unread]


def test_a_lead_is_put_before_what_has_none() -> None:
    target, draft = table(BYTES, ["<s>"], lead=1), table(BYTES, ["<s>", "</s>"], lead=1)
    one, (own, _) = VocabularyMap(target, draft), draft.added
    assert MappedText(one, [0]).inputs == MappedText(one, [*target.lead, 0]).inputs == [own, 0]


def test_special_tokens_of_other_names_agree_by_what_they_are_for() -> None:
    plain = dict(enumerate(BYTES))
    encode = table(BYTES).encode
    target = TokenTable(plain, {20: "<|begin|>", 21: "<|end|>"}, encode, roles={"bos": 20, "eos": 21})
    draft = TokenTable(plain, {30: "<s>", 31: "</s>"}, encode, (30,), {"bos": 30, "eos": 31})
    one = VocabularyMap(target, draft)
    assert (one.counterpart(20), one.counterpart(21), one.mark(21)) == (30, 31, 31)
    without = VocabularyMap(target, TokenTable(plain, {}, encode))
    assert MappedText(without, [20, 0]).inputs == [0]  # a beginning that the draft does not know is nothing to it


@pytest.mark.parametrize("change", [str.lower, str.strip, lambda text: text.replace("b", "")])
def test_a_tokenizer_that_changes_texts_is_not_believed(change) -> None:  # type: ignore[no-untyped-def]
    """What it would change is spelled, line by line."""
    letters = [bytes([byte]) for byte in b"aAbB \n"]
    own = table([*letters, b"ab", b"AB", b" a"])
    draft = table([*letters, b"ab", b"AB", b" a"], encode=lambda text: list(own.encode(change(text))))
    one = VocabularyMap(table(letters), draft)
    text = "ab a\nAB\n b\n"
    assert said(draft, one.written(text.encode())) == text.encode()
    assert one.written(b"aa\n") == own.encode("aa\n") if change is not str.strip else True


def test_hostile_bytes_are_read_in_time_that_is_linear() -> None:
    draft = table([*BYTES, b"ab"])
    data = bytes([0xC3, 0xFF, ord("a")]) * sized(30_000, 100_000)
    tokens = VocabularyMap(table(BYTES), draft).written(data)
    assert len(tokens) == len(data) and tokens[:3] == [BYTES.index(b"\xc3"), UNREAD, 0]


# -- where two vocabularies differ


BASE = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        (BASE, dict(BASE), None),
        (BASE, {"a": 0, "c": 1, "b": 2}, "token 'b' has id 1 in the target and id 2 in the draft; 2 tokens differ"),
        (BASE, {"a": 0, "b": 1}, "token 'c' has id 2 in the target and no id in the draft; 1 tokens differ"),
        ({}, BASE, "token 'a' has no id in the target and id 0 in the draft; 3 tokens differ"),
    ],
)
def test_base_vocabularies_are_equal_or_not(target: dict[str, int], draft: dict[str, int], reason: str | None) -> None:
    assert difference(target, draft) == reason


CLEAR = "\x1b[2J"


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        ({}, {}, None),
        ({}, {7: "<x>"}, None),
        ({7: "<x>"}, {}, None),
        ({7: "<x>", 8: "<y>"}, {8: "<y>", 9: "<z>"}, None),
        ({7: "<x>"}, {8: "<x>"}, "token '<x>' has id 7 in the target and id 8 in the draft; 1 tokens differ"),
        ({7: "<x>"}, {7: "<y>"}, "token '<x>' has id 7 in the target and no id in the draft; 2 tokens differ"),
        ({7: CLEAR}, {8: CLEAR}, "token '\\x1b[2J' has id 7 in the target and id 8 in the draft; 1 tokens differ"),
    ],
)
def test_added_tokens_may_be_missing_but_not_differ(
    target: dict[int, str], draft: dict[int, str], reason: str | None
) -> None:
    assert clash(target, draft) == reason


def test_a_mask_of_what_is_not_shared() -> None:
    tokens = np.array([0, 5, 9, 10, 11])
    assert Unshared().mask(tokens).tolist() == [False] * 5
    assert Unshared(np.array([5]), 10).mask(tokens).tolist() == [False, True, False, True, True]
