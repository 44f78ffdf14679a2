import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotfish.errors import ModelError
from pilotfish.model.grouped import dense
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.weights import read_rows, read_tensor_headers, read_tensors, tensor_files
from pilotfish.model.loading.metadata import read_object
from pilotfish.model.loading.packed_weights import packed_weights
from pilotfish.model.loading.tensors import gguf_index

#: The field of config.json that heads trained here carry. Loaders of others ignore it.
DIGEST = "target_embedding_digest"
#: Rows of an embedding that its digest is of.
SAMPLED = 256
_EMBEDDINGS = tuple(f"{x}.embed_tokens.weight" for x in ("model", "model.language_model", "language_model.model"))
#: A tied head is the embedding, and mostly in no file.
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", *_EMBEDDINGS)


@dataclass(frozen=True)
class TargetFacts:
    directory: Path
    architecture: str
    hidden: int
    layers: int
    vocab: int

    @classmethod
    def read(cls, directory: Path) -> "TargetFacts":
        values = read_object(directory / "config.json")
        fields = HeadFields(values, directory / "config.json")
        inner = fields.within("text_config") if fields.has("text_config") else fields
        return cls(
            directory,
            str((fields.take("architectures") or [""])[0]),
            inner.count("hidden_size"),
            inner.count("num_hidden_layers"),
            inner.count("vocab_size") if inner.has("vocab_size") else _embedded(directory),
        )

    def embedding(self) -> Tensor:
        return self._tensor(_EMBEDDINGS)

    def lm_head(self) -> Tensor:
        return self._tensor(_HEADS)

    def digest(self) -> str:
        """Tells targets of equal sizes apart: SHA-256 of up to `SAMPLED` evenly spread rows of the embedding, as
        bfloat16, so that a copy in another type has the same. "" without an embedding by a known name."""
        if index := gguf_index(self.directory):
            rows = self.embedding()[self._sampled(index[_EMBEDDINGS[0]].shape[0])]
        else:
            headers = read_tensor_headers(tensor_files(self.directory))
            name = next((name for name in _EMBEDDINGS if name in headers), None)
            if name is None or not headers[name].shape:
                return ""
            rows = read_rows(headers[name], name, self._sampled(headers[name].shape[0]))
        return hashlib.sha256(rows.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()).hexdigest()

    @staticmethod
    def _sampled(count: int) -> list[int]:
        return sorted({i * count // SAMPLED for i in range(SAMPLED)})

    def _tensor(self, names: tuple[str, ...]) -> Tensor:
        weights = packed_weights(self.directory)
        headers = {} if weights else read_tensor_headers(tensor_files(self.directory))
        found = next((name for name in names if name in (weights.names if weights else headers)), None)
        if found is None:
            raise ModelError(f"head: target {self.directory} has no tensor {names[0]}, which the head shares")
        return dense(weights.read(found, torch.float32)) if weights else read_tensors(headers, [found])[found]


def _embedded(directory: Path) -> int:
    """Tokens of the embedding, for a config.json that leaves their number to its class."""
    headers = read_tensor_headers(tensor_files(directory))
    return next((headers[name].shape[0] for name in _EMBEDDINGS if name in headers), 0)


@dataclass(frozen=True)
class TrainedOn:
    """The target that a head's files name; "" and () for what they leave out."""

    name: str = ""  # as its publishers call it
    architectures: tuple[str, ...] = ()
    digest: str = ""  # `TargetFacts.digest`

    @classmethod
    def read(cls, fields: HeadFields) -> "TrainedOn":
        """ModelError for what is no text. Only speculators name the target's architecture."""
        verifier = fields.within("speculators_config").within("verifier")
        verifier.values()
        names = verifier.take("architectures", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise verifier.refused("architectures", "a list of names")
        return cls(verifier.text("name_or_path"), tuple(names), fields.text(DIGEST))

    def doubt(self, target: TargetFacts) -> str | None:
        """Why `target` is not the one; None if nothing says so. A digest overrules names: copies are renamed."""
        if self.digest and (digest := target.digest()):
            other = f"other embeddings ({self.digest[:12]}) than {target.directory} ({digest[:12]})"
            return None if self.digest == digest else other
        if self.architectures and target.architecture and target.architecture not in self.architectures:
            said = ", ".join(filter(None, (self.name, *self.architectures)))
            return f"{said}, not on {target.directory} ({target.architecture})"
        return None

    def told(self, target: TargetFacts) -> str:
        if (doubt := self.doubt(target)) is not None:
            return f"another target: {doubt}"
        if self.digest and target.digest():
            return "a target with these embeddings"
        return f"{self.name}, as it says" if self.name else "a target that it does not name"

    def fields(self) -> dict[str, Any]:
        return {DIGEST: self.digest} if self.digest else {}


NOTHING_SAID = TrainedOn()
