"""Whether a directory holds a trained head rather than a model, by names alone. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pilotfish.errors import ModelError
from pilotfish.model.heads.weights import read_tensor_headers, tensor_files
from pilotfish.model.loading.metadata import read_object

#: Fields of config.json that only heads have.
_FIELDS = ("speculators_model_type", "eagle_config", "dflash_config", "medusa_num_heads", "target_layer_ids")
#: How names of tensors begin that only heads have.
_TENSORS = ("midlayer.", "fc.", "mtp.", "mtp_layers.", "model.mtp_layers.", "0.0.linear.", "blocks.0.layers.")


def is_head(directory: Path) -> bool:
    """False also for what cannot be read: whoever loads it as a model says why."""
    try:
        fields = read_object(directory / "config.json") if (directory / "config.json").is_file() else {}
        if any(fields.get(name) is not None for name in _FIELDS):
            return True
        files = tensor_files(directory)
        if any(file.name.startswith("medusa_lm_head") for file in files):
            return True
        names = read_tensor_headers(files)
    except (ModelError, OSError):
        return False
    return any(name.startswith(_TENSORS) or name.endswith(".eh_proj.weight") for name in names)
