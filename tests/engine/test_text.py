"""Text by pieces: what is taken is final, whole characters, and never part of a stop string."""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import VOCAB, write_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.token_table import TextStream, token_bytes
from pilotfish.model.loading.metadata import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


def stream(
    tokenizer: Any, tokens: list[int], stops: tuple[str, ...] = (), stop_ids: Collection[int] = (), **params: Any
) -> tuple[list[str], TextStream]:
    """The pieces taken after each token and at the end."""
    text, pieces = TextStream(tokenizer, SamplingParams(stop=stops, **params), stop_ids), list[str]()
    for token in tokens:
        stopped = text.add(token)
        pieces.append(text.take())
        if stopped:
            break
    text.finish()
    return [*pieces, text.take()], text


def byte_tokens(tokenizer: Any, text: str) -> list[int]:
    """One token a byte, whatever the tokenizer has merged."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [tokenizer.convert_tokens_to_ids(letter) for piece, _ in letters for letter in piece]


@given(tokens=st.lists(st.integers(1, VOCAB - 1), max_size=40))
def test_any_tokens_give_what_decode_gives(tokenizer: Any, tokens: list[int]) -> None:
    """But for what begins a character at the end, which is one U+FFFD there."""
    pieces, whole = stream(tokenizer, tokens)
    data = b"".join(map(token_bytes(tokenizer), tokens))
    decoded = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) == whole.text == (decoded[:-1] if whole_bytes(data) < len(data) else decoded)


def whole_bytes(data: bytes) -> int:
    """Without those at the end that begin a character, by UTF-8's table of what may follow a first byte."""
    for begun in range(1, min(3, len(data)) + 1):
        after = [bytes([low]) * n for low in (0x80, 0x90, 0xA0) for n in range(1, 4)]
        if any(can_be_decoded(data[-begun:] + more) for more in after):
            return len(data) - begun
    return len(data)


def can_be_decoded(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


#: A byte as byte-level tokenizers write it.
BYTE_LETTERS: dict[int, str] = bytes_to_unicode()
#: Bytes that begin, go on with and end characters; some never are in UTF-8, and some spell U+FFFD itself.
BYTES = st.one_of(
    st.binary(max_size=12),
    st.text("aé☃😀\ufffd\ud7ff\U0010ffff", max_size=4).map(str.encode),
    st.sampled_from(
        [b"\xe2\x98", b"\xf0\x9f\x98", b"\xef\xbf", b"\xe0\x80", b"\xed\xa0", b"\xf4\x90", b"\xc0", b"\x98"]
    ),
)


@given(data=st.lists(BYTES, max_size=4).map(b"".join), random=st.randoms(use_true_random=False))
def test_only_a_character_that_lacks_its_end_is_left_out(data: bytes, random: Random) -> None:
    """Of byte-level tokens, which may hold the end of one character and the beginning of the next."""
    tokenizer, tokens, at = of_bytes(), list[int](), 0
    while at < len(data):
        part = data[at : at + random.choice((1, 2, 3))]
        piece = "".join(letter for each in part for letter in BYTE_LETTERS[each])
        token = tokenizer.convert_tokens_to_ids(piece) if piece in tokenizer.get_vocab() else None
        tokens.append(tokenizer.convert_tokens_to_ids(BYTE_LETTERS[data[at]]) if token is None else token)
        at += 1 if token is None else len(part)
    pieces, whole = stream(tokenizer, tokens)
    assert "".join(pieces) == whole.text == data[: whole_bytes(data)].decode(errors="replace")


@cache
def of_bytes() -> Any:
    """All bytes, and many tokens of two or three."""
    joined = [
        *(b"\xe2\x98", b"\x98\x83", b"a\xe2", b"\x83\xe2\x98", b"\xf0\x9f"),
        *(b"\x98\x80", b"\x80\xf0\x9f", b"\xbf\xbd", b"\xbd\xef"),
    ]
    pieces = [*BYTE_LETTERS.values(), *("".join(BYTE_LETTERS[byte] for byte in each) for each in joined)]
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@given(data=st.lists(BYTES, max_size=3).map(lambda parts: b"".join(parts).replace(b" ", b"_")))  # one alone is dropped
def test_of_tokens_for_bytes_too(pieces_of_bytes: Any, data: bytes) -> None:
    """As its decoder has them: bytes in a row are all characters, or each of them is a U+FFFD; what had become text
    before they came stays, which U+FFFD itself has not."""

    def decoded(data: bytes) -> str:
        valid = max(n for n in range(len(data) + 1) if data[:n].decode(errors="ignore").encode() == data[:n])
        while valid < len(data) and data[:valid].endswith("\ufffd".encode()):
            valid -= 3
        return data[:valid].decode() + "\ufffd" * (len(data) - valid)

    hello, end = (pieces_of_bytes.convert_tokens_to_ids(piece) for piece in ("▁hello", "!"))
    tokens = [pieces_of_bytes.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    pieces, text = stream(pieces_of_bytes, [hello, *tokens])
    assert "".join(pieces) == text.text == "hello" + decoded(data[: whole_bytes(data)])
    assert stream(pieces_of_bytes, [hello, *tokens, end])[1].text == f"hello{decoded(data)}!"


@pytest.fixture(scope="module")
def pieces_of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


def test_nothing_shows_of_half_a_character_before_the_token_that_ends(tokenizer: Any) -> None:
    """Wherever the output was cut, and whatever its last token was; the length after each token says so too."""
    eos, half = tokenizer.eos_token_id, byte_tokens(tokenizer, "☃")[:2]
    text = TextStream(tokenizer, SamplingParams(), {eos})
    for token in (*tokenizer.encode("ab"), *half, eos):
        text.add(token)
    text.finish()
    assert (text.take(), text.text) == ("ab", "ab") and text.take_ends()[-3:] == [2, 2, 2]
    assert stream(tokenizer, [*tokenizer.encode("ab"), *half, eos])[1].text == "ab"
    shown = stream(tokenizer, [*half, eos], skip_special_tokens=False)[1].text
    assert shown == "\ufffd" + tokenizer.eos_token


@given(
    tokens=st.lists(st.integers(1, VOCAB - 1), max_size=24),
    cuts=st.sets(st.integers(1, 24)),
    stops=st.lists(st.text("aet \ufffd", min_size=1, max_size=4), max_size=3),
    forced=st.integers(0, 12),
)
def test_cuts_change_no_text(tokenizer: Any, tokens: list[int], cuts: set[int], stops: list[str], forced: int) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=forced)
    each, some = TextStream(tokenizer, params), TextStream(tokenizer, params)
    one_by_one, in_batches = "", ""
    for count, token in enumerate(tokens, start=1):
        ended = each.add(token)
        assert some.add(token) == ended
        one_by_one += each.take()
        if count in cuts or ended:
            in_batches += some.take()
            assert in_batches == one_by_one
        if ended:
            break


@given(
    text=st.text("abß\n", max_size=30), stops=st.lists(st.text("abß\n", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_a_stop_string_ends_the_text_and_no_piece_holds_part_of_it(tokenizer: Any, text: str, stops: list[str]) -> None:
    """At the first place where any is complete: before the longest there, or after it where it shows."""
    first = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    hidden = min((first - len(stop) for stop in stops if text[:first].endswith(stop)), default=first)
    for tokens in (tokenizer.encode(text), byte_tokens(tokenizer, text)):
        pieces, whole = stream(tokenizer, tokens, tuple(stops))
        assert "".join(pieces) == whole.text == text[:hidden]
        pieces, whole = stream(tokenizer, tokens, tuple(stops), include_stop_str_in_output=True)
        assert "".join(pieces) == whole.text == text[:first]
        assert pieces[-1] == "" and (whole.stop in stops) == any(stop in text for stop in stops)


def test_special_tokens_that_show(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    tokens = [*tokenizer.encode("ab"), eos, eos, *byte_tokens(tokenizer, "é")[:1], eos, *tokenizer.encode("cd")]
    pieces, whole = stream(tokenizer, tokens, skip_special_tokens=False)
    assert "".join(pieces) == whole.text == tokenizer.decode(tokens)
    assert whole.text.count(tokenizer.eos_token) == 3
    _, ended = stream(tokenizer, [*tokenizer.encode("ab"), eos], skip_special_tokens=False, stop_ids={eos})
    assert ended.text == "ab"


def test_a_special_token_can_be_a_stop_string(tokenizer: Any) -> None:
    tokens = [*tokenizer.encode("ab"), tokenizer.eos_token_id, *tokenizer.encode("cd")]
    assert stream(tokenizer, tokens, (tokenizer.eos_token,), skip_special_tokens=False)[1].text == "ab"
    assert stream(tokenizer, tokens, (tokenizer.eos_token,))[1].text == "abcd"


def test_no_spaces_stand_between_special_tokens(tokenizer: Any, tmp_path: Path) -> None:
    other = sentencepiece(tmp_path)
    other.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    a, b, hello = (other.convert_tokens_to_ids(piece) for piece in ("<a>", "<b>", "▁hello"))
    assert stream(other, [hello, a, b, a, hello], skip_special_tokens=False)[1].text == "hello<a><b><a> hello"
    eos = tokenizer.eos_token_id
    assert stream(tokenizer, [eos, eos], skip_special_tokens=False)[1].text == tokenizer.eos_token * 2


def test_a_stop_string_in_what_the_end_flushes(tokenizer: Any) -> None:
    """U+FFFD, as the model wrote it, becomes text only at the end; a stop string in it stops all the same."""
    tokens = [*byte_tokens(tokenizer, "ab\ufffd"), *byte_tokens(tokenizer, "😀")[:2]]
    pieces, whole = stream(tokenizer, tokens, ("b\ufffd",))
    assert "".join(pieces) == whole.text == "a"
    assert stream(tokenizer, tokens)[1].text == "ab\ufffd"


def sentencepiece(directory: Path) -> Any:
    """A tokenizer as Llama-2's and Mistral's: ▁ for a space, bytes for what it lacks, and a decoder that drops the
    space before the first word."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "▁", "!", "☃"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(directory)
    return load_tokenizer(directory)


def test_a_word_after_a_prompt_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    hello, world = (tokenizer.convert_tokens_to_ids(piece) for piece in ("▁hello", "▁world"))
    for prompt, expected in (([hello], " world world"), ([], "world world"), ([hello] * 20, " world world")):
        text = TextStream(tokenizer, prompt=prompt)
        for token in (world, world):
            text.add(token)
        assert text.text == expected
        assert tokenizer.decode([*prompt, world, world]) == tokenizer.decode(prompt) + expected


def test_text_that_a_decoder_would_change_stays_as_it_was_given() -> None:
    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "X")])
    pieces, text = stream(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"), [0, 0, 1, 1, 0])
    assert "".join(pieces) == text.text == "aabba"


def test_a_prompt_that_ends_within_a_character_says_nothing_of_itself(tokenizer: Any) -> None:
    prompt = [*tokenizer.encode("secret"), *byte_tokens(tokenizer, "☃")[:1]]
    text = TextStream(tokenizer, prompt=prompt)
    for token in (*byte_tokens(tokenizer, "☃")[1:], *tokenizer.encode("x")):
        text.add(token)
    text.finish()
    assert "s" not in text.text and text.text.endswith("x")


@given(st.integers(0, 2**32), st.integers(0, 12))
def test_a_prompt_changes_no_byte_level_text(tokenizer: Any, seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    prompt, tokens = rng.integers(1, VOCAB, length).tolist(), rng.integers(1, VOCAB, 8).tolist()
    alone, after = TextStream(tokenizer), TextStream(tokenizer, prompt=prompt)
    for token in tokens:
        alone.add(token)
        after.add(token)
    alone.finish()
    after.finish()
    assert alone.text == after.text
