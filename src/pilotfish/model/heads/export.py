"""Writes a head in speculators' layout, which vLLM and SGLang load too; `files.read_head` reads it back equal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pilotfish.model.heads.families import block_layouts, eagle, mtp
from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.spec import Decoder, HeadFiles, HeadSpec
from pilotfish.model.heads.target import TargetFacts

#: The library's names of the classes that load them.
_CLASSES = {"eagle3": "Eagle3Speculator", "dspark": "DSparkSpeculator", "mtp": "MTPDraftModel"}
#: Beginnings of names: theirs, and ours.
_NAMES = {"eagle3": eagle.LAYERS, "dspark": block_layouts.NAMES, "mtp": mtp.SPECULATORS}


def export_head(files: HeadFiles, directory: Path, target: TargetFacts, *, tokens: int = 3, lean: bool = False) -> None:
    """`tokens` is how many tokens others guess. Leaves out the target's own tensors; for EAGLE-3 only if `lean`, as the
    library's own loader leaves memory there uninitialized."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(files, target, lean))
    config = _config(files, target, tokens)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _tensors(files: HeadFiles, target: TargetFacts, lean: bool) -> Iterator[tuple[str, Tensor]]:
    names = {ours: theirs for theirs, ours in _NAMES[files.spec.kind].items()}
    shared = _shared(files, target) if lean or files.spec.kind != "eagle3" else set()
    for ours, tensor in files.tensors.items():
        if ours in shared:
            continue
        beginning = next((x for x in names if ours.startswith(x)), "")
        yield names.get(beginning, "") + ours[len(beginning) :], tensor.contiguous()
    if files.d2t is not None:
        yield "d2t", files.d2t - torch.arange(len(files.d2t))
        listed = torch.zeros(target.vocab, dtype=torch.bool)
        listed[files.d2t] = True
        yield "t2d", listed


def _shared(files: HeadFiles, target: TargetFacts) -> set[str]:
    said = slice(None) if files.d2t is None else files.d2t
    candidates = {"embed_tokens.weight": target.embedding(), "lm_head.weight": target.lm_head()[said]}
    own = files.tensors  # maybe of another type: a reader brings both to its own
    return {name for name, theirs in candidates.items() if torch.equal(own[name], theirs.to(own[name].dtype))}


def _config(files: HeadFiles, target: TargetFacts, tokens: int) -> dict[str, Any]:
    spec, head = files.spec, files.spec.head
    assert isinstance(head, RecurrentHead | BlockHead)
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens}
    about = {"name_or_path": files.trained_on.name or None, "architectures": [target.architecture]}
    fields: dict[str, Any] = {
        "architectures": [_CLASSES[spec.kind]],
        "speculators_model_type": spec.kind,
        "speculators_config": {
            "algorithm": spec.kind,
            "proposal_methods": [{**greedy, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": about,
        },
        "transformer_layer_config": _decoder_fields(head.decoder, target.vocab),
        "dtype": str(files.tensors["layers.0.mlp.up_proj.weight"].dtype)[6:],
        "tie_word_embeddings": False,
    }
    own = _block_fields(head, spec) if isinstance(head, BlockHead) else _recurrent_fields(head, spec)
    return fields | own | files.trained_on.fields()


def _recurrent_fields(head: RecurrentHead, spec: HeadSpec) -> dict[str, Any]:
    if spec.kind == "mtp":
        return {"num_nextn_predict_layers": 1}
    return {
        "draft_vocab_size": spec.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(spec.projection.layers),
        "norm_before_residual": head.residual_normed,
        "norm_before_fc": spec.projection.joined_norm,
        "fc_norm": spec.projection.part_norms,
        "norm_output": head.recycles_normed,
        "embed_requires_grad": False,
    }


def _block_fields(head: BlockHead, spec: HeadSpec) -> dict[str, Any]:
    return {
        "draft_vocab_size": spec.draft_vocab,
        "aux_hidden_state_layer_ids": list(spec.projection.layers),
        "block_size": head.block,
        "mask_token_id": head.mask_token,
        "sample_from_anchor": head.anchored,
        "markov_rank": head.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": bool(head.confidence),
        "confidence_head_with_markov": head.confidence == "markov",
    }


def _decoder_fields(decoder: Decoder, vocab: int) -> dict[str, Any]:
    """Trained heads have neither windows nor gates."""
    return {
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.ffn,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.activation,
        "rms_norm_eps": decoder.eps,
        "attention_bias": decoder.attention_bias,
        "max_position_embeddings": decoder.context,
        "rope_parameters": dict(decoder.rope),
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
