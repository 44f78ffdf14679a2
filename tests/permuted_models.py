"""A model whose tokens have other ids, and nothing else that is another."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from support import VOCAB, edit_tensors


def permuted(model: Path, directory: Path, seed: int = 0) -> Path:
    """A copy of a tiny model in `directory`."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    places = np.random.default_rng(seed).permutation(VOCAB)  # new ids by old ones
    _renumber(directory / "tokenizer.json", places.tolist())
    order = torch.from_numpy(np.argsort(places))

    def move(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][order].contiguous()

    return edit_tensors(directory, move)


def _renumber(path: Path, places: list[int]) -> None:
    fields = json.loads(path.read_text())
    vocabulary = fields["model"]["vocab"]
    fields["model"]["vocab"] = {token: places[number] for token, number in vocabulary.items()}
    for added in fields["added_tokens"]:
        added["id"] = places[added["id"]]
    path.write_text(json.dumps(fields))
