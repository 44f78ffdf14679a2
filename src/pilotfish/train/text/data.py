import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pilotfish.errors import ParameterError

Tokens: TypeAlias = npt.NDArray[np.unsignedinteger]  # [tokens], or [rows, tokens]

EXCLUDED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "testing", "idle_test", "benchmarks", "encodings", "pydoc_data")
) | {"turtledemo", "_triton_ops_meta.py", "cuda_to_hip_mappings.py"}
FALLBACK_HELD_OUT = 20  # one document in this many, where no named package is among the sources

END_OF_TEXT = "<|endoftext|>"  # id 0: begins, ends and pads
#: A word keeps the one space or mark before it (` return`, `_name`), marks keep the line break behind them (`):\n`).
#: The rest of an indentation is one piece, so that it costs one token and a prompt that ends in a line break ends on a
#: token boundary.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: The models only continue text: a conversation is its messages' text, one after the other.
CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('\\n') }}"

JUMPING_SHARE = 0.25  # of a batch's rows


@dataclass(frozen=True)
class Document:
    name: str  # path below its source
    text: str


def collect(sources: Sequence[Path], packages: Sequence[str]) -> list[Document]:
    """Every readable, distinct `.py` document, sorted. Default: those of the standard library and the packages."""
    excluded = frozenset() if sources else EXCLUDED
    roots = sources or (Path(sysconfig.get_path("stdlib")), *map(_installed, packages))
    documents = [document for root in roots for document in _documents(root, excluded)]
    by_text = {document.text: document for document in reversed(documents)}  # the first of equal texts
    return sorted(by_text.values(), key=attrgetter("name"))


def split(documents: Sequence[Any], held_out: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """To train on, and held out: the named packages' documents, or a twentieth if none is there."""
    chosen = {document.name for document in documents if _belongs(document.name, held_out)}
    if not chosen:
        ranked = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
        chosen = {document.name for document in ranked[: -(-len(ranked) // FALLBACK_HELD_OUT)]}
    training = [document for document in documents if document.name not in chosen]
    if not training:
        raise ParameterError("source", f"{len(documents)} documents", "two or more distinct .py files")
    return training, [document for document in documents if document.name in chosen]


def _installed(package: str) -> Path:
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ParameterError("package", package, "an installed package")
    return Path(found.submodule_search_locations[0])


def _documents(source: Path, excluded: frozenset[str]) -> Iterable[Document]:
    if not source.exists():
        raise ParameterError("source", str(source), "an existing file or directory")
    paths = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    root = source if source.is_dir() else source.parent
    for path in paths:
        name = PurePosixPath(path.relative_to(root).as_posix())
        if not excluded.isdisjoint(name.parts):
            continue
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_bytes().decode("utf-8")
            if text.strip() and "\0" not in text:
                yield Document(str(name), text.replace("\r\n", "\n"))


def _belongs(name: str, packages: Sequence[str]) -> bool:
    """`test_email.py` belongs to `email`."""
    parts = PurePosixPath(name).with_suffix("").parts
    return any(part == one or part.startswith(f"test_{one}") for part in parts for one in packages)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, in_bytes])
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


def encode(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """[tokens], the end token after each document."""
    texts = [document.text for document in documents]
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array([*row.ids, tokenizer.eos_token_id], dtype=np.uint16) for row in encodings])


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class TokenBatch(NamedTuple):
    tokens: Tensor  # int64 [rows, length + 1]: inputs and, one further, targets
    positions: Tensor  # int64 [rows, length]

    @classmethod
    def blank(cls, rows: int, length: int) -> "TokenBatch":
        return cls(torch.zeros(rows, length + 1, dtype=torch.int64), torch.arange(length).expand(rows, -1))


@dataclass(frozen=True)
class Windows:
    """Each batch is a function of seed and step: a resumed run continues exactly. Every epoch shifts the cuts and
    shuffles. In a share of the rows positions jump once (0 1 2 903 904), so that attention learns distances up to the
    context length."""

    tokens: Tokens
    rows: int
    length: int
    context: int
    seed: int

    def batch(self, step: int) -> TokenBatch:
        starts = [self._start(step * self.rows + row) for row in range(self.rows)]
        windows = np.stack([self.tokens[start : start + self.length + 1] for start in starts])
        return TokenBatch(torch.from_numpy(windows.astype(np.int64)), self._positions(step))

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self._per_epoch)
        generator = np.random.default_rng((self.seed, 0, epoch))
        shift = int(generator.integers(self.length))
        return shift + self.length * int(generator.permutation(self._per_epoch)[place])

    @property
    def _per_epoch(self) -> int:
        return (len(self.tokens) - self.length) // self.length

    def _positions(self, step: int) -> Tensor:
        generator = np.random.default_rng((self.seed, 1, step))
        jumping = generator.random((self.rows, 1)) < JUMPING_SHARE
        cut = generator.integers(1, self.length, (self.rows, 1))
        jump = generator.integers(self.context - self.length + 1, size=(self.rows, 1))
        place = np.arange(self.length)
        return torch.from_numpy(place + jumping * jump * (place >= cut))


def mixed(sources: Sequence[Windows], step: int) -> TokenBatch:
    return TokenBatch(*map(torch.cat, zip(*(windows.batch(step) for windows in sources), strict=True)))
