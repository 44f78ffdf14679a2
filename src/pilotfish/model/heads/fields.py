"""The fields of a head's config.json: each is read by name and checked, and an unread one is refused."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pilotfish.errors import ModelError

#: Fields that say nothing about the head's arithmetic: names, training, what transformers writes into every file.
_SILENT = frozenset((
    "architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "name_or_path", "_attn_implementation", "attn_implementation", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "initializer_range", "use_cache", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop",
    "pretraining_tp", "max_window_layers", "output_attentions", "output_hidden_states", "return_dict", "is_decoder",
    "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "tie_encoder_decoder", "torchscript", "use_bfloat16", "pruned_heads", "tokenizer_class", "prefix",
    "task_specific_params", "finetuning_task", "cross_attention_hidden_size", "ttt_length", "step_loss_decay",
    "num_anchors", "confidence_head_alpha", "loss_decay_gamma", "embed_requires_grad", "speculators_version",
    "num_lookahead_tokens",
))  # fmt: skip


class HeadFields:
    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.path = path
        self._values, self._prefix = values, prefix
        self._read: set[str] = set()
        self._inner: dict[str, HeadFields] = {}

    def refused(self, name: str, allowed: str) -> ModelError:
        value = repr(self._values.get(name))
        shown = value if len(value) <= 100 else value[:100] + "…"
        return ModelError(f"head: {self.path}: {self._prefix}{name}: {shown} is not allowed; expected {allowed}")

    def take(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def values(self) -> dict[str, Any]:
        self._read |= set(self._values)
        return dict(self._values)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = 1 << 31) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refused(name, f"an integer of at least {least}")
        if value > most:
            raise self.refused(name, f"at most {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.refused(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.refused(name, "true or false")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self.take(name, default)
        if value not in allowed:
            raise self.refused(name, f"one of {', '.join(allowed)}")
        return str(value)

    def text(self, name: str) -> str:
        value = self.take(name, "")
        if not isinstance(value, str):
            raise self.refused(name, "a text")
        return value

    def only(self, name: str, value: Any, why: str) -> None:
        if self.take(name, value) != value:
            raise self.refused(name, f"{value!r}: {why}")

    def ids(self, name: str) -> tuple[int, ...] | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(type(x) is int for x in value):
            raise self.refused(name, "a list of integers, at least one")
        if len(set(value)) != len(value):
            raise self.refused(name, "a list without repetitions")
        return tuple(value)

    def within(self, name: str) -> "HeadFields":
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise self.refused(name, "an object")
        return self._inner.setdefault(name, HeadFields(value, self.path, f"{self._prefix}{name}."))

    def refuse_unread(self, kind: str) -> None:
        """ModelError for the first field that was not read and may matter."""
        for name, value in self._values.items():
            if name not in self._read and name not in _SILENT and value not in (None, [], {}, False):
                raise self.refused(name, f"no such field in a head of {kind}: what it asks for is not supported")
        for inner in self._inner.values():
            inner.refuse_unread(kind)
