from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer

from pilotfish.core.drafting.vocabulary import without_ids_from
from pilotfish.errors import ParameterError
from pilotfish.printable import one_line

_ANGLES = re.compile(r"<.*>", re.DOTALL)


def vocabulary_of(
    tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], slices: list[str] | None = None
) -> LLTokenizer:
    """Without entries beyond the model's `vocab_size`. ParameterError if llguidance cannot read a (fast) tokenizer.

    Special tokens stay out of texts: llguidance would force such a token where its text is the only way on, and then
    not take it. Grammars name them by id, as in `<[151657]>`."""
    described = without_ids_from(json.loads(tokenizer.backend_tokenizer.to_str()), vocab_size)
    described |= dict.fromkeys(("padding", "truncation", "post_processor"))  # they add what no text has
    for token in described["added_tokens"]:
        if token["special"] or _ANGLES.fullmatch(token["content"]):  # llguidance takes both for special
            _rename(described, token, f"\U000f0000{token['id']}\U000f0000")  # of private use: no text has it
    ends = sorted(eos_ids) or tokenizer.eos_token_id
    try:
        return LLTokenizer(json.dumps(described), n_vocab=vocab_size, eos_token=ends, slices=slices)
    except ValueError as error:
        message = f"structured_outputs: the model's tokenizer does not allow them: {one_line(str(error))}"
        raise ParameterError.described("structured_outputs", message) from error


def _rename(described: dict[str, Any], token: dict[str, Any], name: str) -> None:
    model, entries = described["model"], described["model"]["vocab"]
    if model.get("unk_token") == token["content"]:
        model["unk_token"] = name
    if isinstance(entries, dict):
        if token["content"] in entries:
            entries[name] = entries.pop(token["content"])
    else:  # of pieces and their scores, by id
        for entry in entries:
            if entry[0] == token["content"]:
                entry[0] = name
    token |= {"content": name, "special": True}
