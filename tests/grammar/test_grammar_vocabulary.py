"""Vocabularies: which tokens a text may be written with."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from
from pycode_grammars import EOS, VOCAB, ids
from test_state import legal
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import ParameterError
from pilotfish.grammar.compile import SLICES, vocabulary_of
from pilotfish.grammar.state import MatcherState

CALL, WORD, MARK = 4096, 4097, 4098


@cache
def pycode() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(resolve_pair("pycode").target)
    tokenizer.add_tokens(["<tool_call>", "plainword"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[MARK]"]})
    return tokenizer


def state(grammar: str, tokenizer: Any, vocab_size: int = VOCAB, eos: int = EOS) -> MatcherState:
    return MatcherState(LLMatcher(vocabulary_of(tokenizer, vocab_size, [eos], SLICES), grammar, log_level=0))


@pytest.mark.parametrize("text", ["<tool_call>", "a <tool_call> b", "[MARK]", "<|endoftext|>x", "<tool_call>plainword"])
def test_a_text_that_is_a_special_tokens_too_is_written_in_others(text: str) -> None:
    """llguidance forces the token there, and does not take it."""
    tokenizer, output = pycode(), list[int]()
    tracked = state(grammar_from("choice", json.dumps([text])), tokenizer)
    while not tracked.ended:
        forced = list(tracked.forced([])) or sorted(legal(tracked, []) - {EOS})[:1]
        assert all(tracked.allows(forced[: i + 1]) for i in range(len(forced)))
        for token in forced:
            tracked.extend(token)
        output += forced
        assert tracked.problem is None
    assert tokenizer.decode(output, skip_special_tokens=False) == text
    assert not {EOS, CALL, MARK} & set(output)


def test_special_tokens_can_be_named_and_are_no_text() -> None:
    named = state(LLMatcher.grammar_from_lark(f'start: <[{CALL}]> "ab" <[{MARK}]>'), pycode())
    assert legal(named, []) == {CALL}
    assert named.allows([CALL, *ids("ab"), MARK])
    inside = state(LLMatcher.grammar_from_json_schema('{"type": "string"}'), pycode())
    inside.extend(ids('"')[0])
    assert not {EOS, CALL, MARK} & legal(inside, []) and WORD in legal(inside, [])


def test_a_vocabulary_of_pieces_and_scores() -> None:
    tokenizer = of_pieces(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # as Llama 2 has it
    )
    tracked = state(grammar_from("choice", json.dumps(["a</s>"])), tokenizer, VOCAB, eos=1)
    output = list[int]()
    while not tracked.ended:
        output.append(max(legal(tracked, []) - {1}))
        tracked.extend(output[-1])
    assert tracked.problem is None and 1 not in output
    assert "".join(tokenizer.convert_ids_to_tokens(output)) == "a</s>"


def test_a_vocabulary_with_bytes_and_an_unknown_token() -> None:
    """As Llama 2 has it: its special tokens are in the vocabulary itself, and a processor adds the first."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    model = models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tracked = state(LLMatcher.grammar_from_json_schema('{"type": "string", "maxLength": 2}'), tokenizer, VOCAB, eos=2)
    tracked.extend(names.index("<0x22>"))
    inside = {names[i] for i in legal(tracked, [])}
    assert {"a", "b", "▁a", "<0x22>", "<0xC3>"} <= inside
    assert not {"<unk>", "<s>", "</s>", "<0x0A>"} & inside


@pytest.mark.parametrize("size", [WORD, CALL, 3000, 4096 + 61])
def test_tokens_are_those_of_tokenizer_and_embedding(size: int) -> None:
    """Entries beyond the embedding are left out, as Gemma 3 has them, added and not; so are ids beyond the tokenizer,
    where an embedding is padded."""
    every = any_text(pycode(), MARK + 1)
    assert {WORD, 4095} <= every and not {CALL, MARK} & every
    assert any_text(pycode(), size) == {token for token in every if token < size}


def any_text(tokenizer: Any, vocab_size: int) -> set[int]:
    """Tokens with which a text may begin, by the mask of an embedding of that size."""
    vocabulary = vocabulary_of(tokenizer, vocab_size, [EOS], SLICES)
    matcher = LLMatcher(vocabulary, grammar_from("regex", "(?s).*"), log_level=0)
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def test_a_tokenizer_that_cannot_be_read_is_named() -> None:
    tokenizer = of_pieces(decoders.Metaspace())
    with pytest.raises(ParameterError, match="structured_outputs: the model's tokenizer does not allow them: "):
        vocabulary_of(tokenizer, len(tokenizer), [1], SLICES)


def of_pieces(decoder: Any) -> Any:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in "ab</s>")]
    pieces = [piece for place, piece in enumerate(pieces) if piece[0] not in {p for p, _ in pieces[:place]}]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
