import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pilotfish.model.heads.export import export_head
from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.spec import Head, HeadFiles, HeadSpec
from pilotfish.model.heads.target import TargetFacts, TrainedOn
from pilotfish.train.heads.trainee import Trainee
from pilotfish.train.recipes import HeadRecipe
from pilotfish.train.taught_target import TaughtTarget

STORED = torch.bfloat16


def trained_files(
    trainee: Trainee, head: Head, recipe: HeadRecipe, target: TaughtTarget, draft_ids: Tensor | None
) -> HeadFiles:
    shared = trainee.shared
    tensors = trainee.state_dict()
    if not isinstance(head, MedusaHead):
        tensors |= {"embed_tokens.weight": shared.embedding, "lm_head.weight": shared.output}
    spec = HeadSpec(head, recipe.kind, "pilotfish", shared.embedding.shape[1], target.layers, len(shared.output))
    stored = {name: tensor.detach().to("cpu", STORED).contiguous() for name, tensor in tensors.items()}
    trained_on = TrainedOn(digest=TargetFacts.read(recipe.target).digest())
    return HeadFiles(spec, stored, None if draft_ids is None else draft_ids.cpu(), "", trained_on)


def write_head(files: HeadFiles, recipe: HeadRecipe, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    head = files.spec.head
    if isinstance(head, MedusaHead):
        _write_medusa(files, head, directory)
    else:
        export_head(files, directory, TargetFacts.read(recipe.target), tokens=recipe.depth, lean=recipe.lean)
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes files for their owner alone


def _write_medusa(files: HeadFiles, head: MedusaHead, directory: Path) -> None:
    directory.mkdir(parents=True)
    tensors = {
        name.replace("heads.", "blocks.", 1).replace(".blocks.", ".layers.")
        if ".blocks." in name
        else f"lm_heads.{name.split('.')[1]}.weight": tensor
        for name, tensor in files.tensors.items()
    }
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.hidden,
        "num_heads": head.heads,
        "num_hidden_layers": head.blocks,
        "medusa_fc_bias": head.bias,
        "truncated_vocab_size": files.spec.draft_vocab,
        **files.trained_on.fields(),
    }
    if files.d2t is not None:
        tensors["token_map"] = files.d2t
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
