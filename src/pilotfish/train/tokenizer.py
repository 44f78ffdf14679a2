"""A byte-level BPE tokenizer for code, trained on the documents and saved in Hugging Face's format.

Text is cut before merging: a word keeps the one space or mark before it (` return`, `_name`), marks
keep the line break behind them (`):\\n`), and the rest of an indentation is one piece. So a line's
indentation costs one token, and a prompt that ends in a line break ends on a token boundary.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # id 0: begins, ends and pads
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# These models continue text; a conversation is its messages' text, one after the other.
CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('\\n') }}"


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Learn `vocab_size` tokens from the texts: 1 special, 256 bytes, the rest merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a directory."""
    return PreTrainedTokenizerFast.from_pretrained(directory)


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]
