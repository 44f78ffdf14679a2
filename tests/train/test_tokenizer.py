from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pilotfish.train.corpus import collect
from pilotfish.train.tokenizer import END_OF_TEXT, encode_texts, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(sources: Path) -> PreTrainedTokenizerFast:
    return train_tokenizer((document.text for document in collect([sources])), 320, 256)


@pytest.mark.parametrize("text", ["def f(x):\n        return x\n", "tab\té 漢字 🐟\r\n", "  a  b ", ""])
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(encode_texts(tokenizer, [text])[0]) == text


def test_end_of_text_is_token_0_and_nothing_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(END_OF_TEXT) == 0
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer("def")["input_ids"] == encode_texts(tokenizer, ["def"])[0]
    assert 257 < len(tokenizer) <= 320


def test_a_prompt_that_ends_in_a_line_break_ends_on_a_token_boundary(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt, rest = "def f(x):\n", "    return x\n"
    whole, first, second = encode_texts(tokenizer, [prompt + rest, prompt, rest])
    assert whole == first + second


def test_saved_tokenizer_loads_and_renders_messages(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "a = 1"}, {"role": "assistant", "content": "b = 2"}]
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.apply_chat_template(messages, tokenize=False) == "a = 1\nb = 2"
        assert loaded("x = a + 1\n")["input_ids"] == tokenizer("x = a + 1\n")["input_ids"]
