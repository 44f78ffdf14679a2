"""Tiny random heads on disk, in the layout of every publisher."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.target import TargetFacts

#: A head's shape; the target's own is `TargetFacts`.
HEADS, KV_HEADS, HEAD_DIM, FFN = 4, 2, 32, 96
#: Layers that the default of EAGLE-3 can be of.
TARGET_LAYERS = 8


def write_target(folder: Path, *, hidden: int = 64, vocab: int = 512, layers: int = TARGET_LAYERS) -> TargetFacts:
    """A target's configuration, embedding and lm_head, and nothing that would run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden}
    write_config(folder, {**config, "num_hidden_layers": layers, "vocab_size": vocab})
    draw = Drawing(5)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file({name: draw(vocab, hidden) for name in names}, folder / "model.safetensors")
    return TargetFacts.read(folder)


class Drawing:
    """Random tensors in order."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.2 * torch.randn(*shape, generator=self._generator)


def write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def change_config(folder: Path, **changes: Any) -> None:
    """Changes fields; those given as None go."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    write_config(folder, {name: value for name, value in fields.items() if value is not None})


def change_tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Adds and replaces tensors; those given as None go."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")


def layer_tensors(
    draw: Drawing, hidden: int, *, columns: int | None = None, qk_norm: bool = False, gated: bool = False
) -> dict[str, Tensor]:
    """Of one decoder layer; `columns` are those of what its attention gets."""
    columns = columns or hidden
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"q": (queries * (2 if gated else 1), columns), "k": (keys, columns), "v": (keys, columns)}
    tensors = {f"self_attn.{x}_proj.weight": draw(*shape) for x, shape in {**shapes, "o": (hidden, queries)}.items()}
    neurons = {"gate": (FFN, hidden), "up": (FFN, hidden), "down": (hidden, FFN)}
    tensors |= {f"mlp.{x}_proj.weight": draw(*shape) for x, shape in neurons.items()}
    tensors |= {f"{x}_layernorm.weight": draw(hidden, mean=1.0) for x in ("input", "post_attention")}
    if qk_norm:
        tensors |= {f"self_attn.{x}_norm.weight": draw(HEAD_DIM, mean=1.0) for x in "qk"}
    return tensors


def vocabulary_tensors(draft_vocab: int, vocab: int) -> dict[str, Tensor]:
    """d2t as it is published: differences; and t2d."""
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:draft_vocab].sort().values
    listed = torch.zeros(vocab, dtype=torch.bool)
    listed[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": listed}


def decoder_fields(hidden: int, vocab: int, layers: int = 1) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": FFN, "num_hidden_layers": layers, "vocab_size": vocab}
    attention = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    others = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 2048}
    return {**shape, **attention, **others, "attention_bias": False, "tie_word_embeddings": False}


def wrapper_fields(
    kind: str, fields: Mapping[str, Any], *, model_type: str = "llama", tokens: int = 3
) -> dict[str, Any]:
    """speculators' configuration around that of a decoder."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    proposal = {"proposal_methods": [greedy], "default_proposal_method": "greedy", "verifier": verifier}
    names = {"architectures": [f"{kind.capitalize()}Speculator"], "speculators_model_type": kind, "dtype": "float32"}
    config = {"speculators_version": "0.9.0", "speculators_config": {"algorithm": kind, **proposal}}
    return {**names, **config, "transformer_layer_config": {"model_type": model_type, **fields}}


EAGLE3_DIALECTS = ("safeailab", "speculators", "modelopt", "deepspec")


def write_eagle3(
    folder: Path,
    dialect: str = "speculators",
    *,
    target: TargetFacts,
    layers: tuple[int, ...] = (2, 4, 5),
    draft_vocab: int = 0,
    hidden: int = 0,
    depth: int = 1,
    **fields: Any,
) -> Path:
    """`layers` in our numbers; `draft_vocab` and `hidden` are the target's where they are 0; `fields` are further ones
    of its configuration, whose tensors come along."""
    draw, hidden, width = Drawing(), hidden or target.hidden, target.hidden
    prefix = "midlayer." if dialect == "safeailab" else "layers.0."
    first = layer_tensors(draw, hidden, columns=2 * hidden, qk_norm=dialect == "deepspec")
    tensors = {f"{prefix}{name}": x for name, x in first.items()}
    tensors[f"{prefix}hidden_norm.weight"] = draw(hidden, mean=1.0)
    for i in range(1, depth):
        further = layer_tensors(draw, hidden, qk_norm=dialect == "deepspec")
        tensors |= {f"layers.{i}.{name}": x for name, x in further.items()}
    tensors["fc.weight"] = draw(hidden, len(layers) * width)
    tensors["norm.weight"] = draw(hidden, mean=1.0)
    tensors["lm_head.weight"] = draw(draft_vocab or target.vocab, hidden)
    if dialect in ("speculators", "deepspec") or hidden != width:
        tensors["embed_tokens.weight"] = draw(target.vocab, hidden)
    if draft_vocab:
        tensors |= vocabulary_tensors(draft_vocab, target.vocab)
    if fields.get("norm_before_fc"):
        tensors["input_norm.weight"] = draw(len(layers) * width, mean=1.0)
    if fields.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": draw(width, mean=1.0) for i in range(len(layers))}
    config = eagle3_config(dialect, target, layers, draft_vocab, decoder_fields(hidden, target.vocab, depth))
    return write_head(folder, {**config, **fields}, tensors)


def eagle3_config(
    dialect: str, target: TargetFacts, layers: tuple[int, ...], draft_vocab: int, decoder: dict[str, Any]
) -> dict[str, Any]:
    """Layer ids as the dialect counts them. SafeAILab's have none."""
    reduced = {"draft_vocab_size": draft_vocab or target.vocab}
    wide = {} if decoder["hidden_size"] == target.hidden else {"target_hidden_size": target.hidden}
    outputs = [i - 1 for i in layers]
    match dialect:
        case "safeailab":
            return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **decoder, **reduced, **wide}
        case "speculators":
            ids = {"eagle_aux_hidden_state_layer_ids": list(layers)}
            return {**wrapper_fields("eagle3", decoder), **reduced, **wide, **ids, "norm_before_residual": True}
        case "modelopt":
            flags = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
            inner = dict.fromkeys((*flags, "next_layer_regular"), True) | {"use_mtp_layernorm": False}
            inner |= {"eagle_aux_hidden_state_layer_ids": outputs}
            names = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
            return {**names, **decoder, **reduced, **wide, "eagle_config": inner}
        case "deepspec":
            names = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "num_target_layers": target.layers}
            return {**names, **decoder, "target_layer_ids": outputs, "ttt_length": 7, "step_loss_decay": 0.8}
    raise ValueError(dialect)


MASK, BLOCK = 500, 6
PEAGLE_DIALECTS = ("speculators", "vllm")


def write_peagle(
    folder: Path,
    dialect: str = "speculators",
    *,
    target: TargetFacts,
    layers: tuple[int, ...] = (2, 4, 5),
    tokens: int = 4,
    **about: Any,
) -> Path:
    """`tokens` of a forward; `about` is EAGLE-3's."""
    if dialect == "speculators":
        wrapper = wrapper_fields("peagle", {}, tokens=tokens)
        own = {name: wrapper[name] for name in ("speculators_model_type", "speculators_config")}
        own |= {"architectures": ["PEagleSpeculator"], "norm_before_residual": False, "mask_token_id": MASK}
    else:
        own = {"eagle_aux_hidden_state_layer_ids": list(layers), "ptd_token_id": MASK, "num_depths": tokens}
    base = "speculators" if dialect == "speculators" else "safeailab"
    head = write_eagle3(folder, base, target=target, layers=layers, **{**own, **about})
    change_tensors(head, {"mask_hidden": 5 * Drawing(9)(1, 1, len(layers) * target.hidden)})
    return head


BLOCK_DIALECTS = ("z-lab", "speculators", "deepspec")


def write_block(
    folder: Path,
    kind: str = "dspark",
    dialect: str = "speculators",
    *,
    target: TargetFacts,
    layers: tuple[int, ...] = (2, 4, 6),
    draft_vocab: int = 0,
    depth: int = 2,
    rank: int = 16,
    gated: bool = False,
    confidence: str = "markov",
    **fields: Any,
) -> Path:
    """DFlash or DSpark; `rank`, `gated` and `confidence` are of the latter."""
    draw, hidden = Drawing(), target.hidden
    tensors: dict[str, Tensor] = {}
    for i in range(depth):
        tensors |= {f"layers.{i}.{name}": x for name, x in layer_tensors(draw, hidden, qk_norm=True).items()}
    tensors["fc.weight"] = draw(hidden, len(layers) * hidden)
    tensors |= {f"{name}.weight": draw(hidden, mean=1.0) for name in ("hidden_norm", "norm")}
    if dialect == "deepspec":
        tensors["embed_tokens.weight"] = draw(target.vocab, hidden)
    if dialect == "deepspec" or draft_vocab:
        tensors["lm_head.weight"] = draw(draft_vocab or target.vocab, hidden)
    if draft_vocab:
        tensors |= vocabulary_tensors(draft_vocab, target.vocab)
    if kind == "dspark":
        tensors |= markov_tensors(draw, target, draft_vocab or target.vocab, rank, gated, confidence)
    config = block_config(kind, dialect, target, layers, draft_vocab, depth)
    if kind == "dspark":
        config = with_markov(config, dialect, rank, gated, confidence)
    return write_head(folder, {**config, **fields}, tensors)


def markov_tensors(
    draw: Drawing, target: TargetFacts, draft_vocab: int, rank: int, gated: bool, confidence: str
) -> dict[str, Tensor]:
    hidden = target.hidden
    tensors: dict[str, Tensor] = {}
    if rank:
        tensors["markov_head.markov_w1.weight"] = draw(target.vocab, rank)
        tensors["markov_head.markov_w2.weight"] = draw(draft_vocab, rank)
    if gated:
        tensors["markov_head.gate_proj.weight"] = draw(rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = draw(rank)
    if confidence:
        tensors["confidence_head.proj.weight"] = draw(1, hidden + (rank if confidence == "markov" else 0))
        tensors["confidence_head.proj.bias"] = draw(1)
    return tensors


def block_config(
    kind: str, dialect: str, target: TargetFacts, layers: tuple[int, ...], draft_vocab: int, depth: int
) -> dict[str, Any]:
    decoder, outputs = decoder_fields(target.hidden, target.vocab, depth), [i - 1 for i in layers]
    decoder = {**decoder, "layer_types": ["full_attention"] * depth, "use_sliding_window": False}
    common = {"model_type": "qwen3", "num_target_layers": target.layers, "block_size": BLOCK, **decoder}
    reduced = {"draft_vocab_size": draft_vocab} if draft_vocab else {}
    match dialect:
        case "z-lab":
            inner = {"mask_token_id": MASK, "target_layer_ids": outputs}
            inner |= {"projector_type": "dspark"} if kind == "dspark" else {}
            name = "DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"
            return {"architectures": [name], **common, **reduced, "dflash_config": inner}
        case "speculators":
            wrapper = wrapper_fields(kind, decoder, model_type="qwen3", tokens=BLOCK - (kind == "dflash"))
            own = {"aux_hidden_state_layer_ids": list(layers), "mask_token_id": MASK, "block_size": BLOCK}
            reduced = {"draft_vocab_size": draft_vocab or target.vocab}
            return {**wrapper, **own, **reduced, "sample_from_anchor": kind == "dspark"}
        case "deepspec":
            own = {"mask_token_id": MASK, "target_layer_ids": outputs, "num_anchors": 512}
            return {"architectures": ["Qwen3DSparkModel"], **common, **own, "markov_rank": 0}
    raise ValueError(dialect)


def with_markov(config: dict[str, Any], dialect: str, rank: int, gated: bool, confidence: str) -> dict[str, Any]:
    """SpecForge, in z-lab's layout, puts these fields into an object, others to the outside."""
    fields = {
        "markov_rank": rank,
        "markov_head_type": "gated" if gated else "vanilla",
        "enable_confidence_head": bool(confidence),
        "confidence_head_with_markov": confidence == "markov",
    }
    if dialect == "z-lab":
        return {**config, "dflash_config": {**config["dflash_config"], **fields}}
    return {**config, **fields}


MTP_DIALECTS = ("deepseek", "qwen", "mimo", "speculators")
#: Names of a module's own tensors: input_proj, hidden norm, embedding norm, final norm; what its layer's begin with.
_MTP_NAMES = {
    "deepseek": ("eh_proj", "hnorm", "enorm", "shared_head.norm", ""),
    "qwen": ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm", "layers.0."),
    "mimo": ("input_proj", "hidden_layernorm", "token_layernorm", "final_layernorm", ""),
}
_MTP_NAMES["speculators"] = _MTP_NAMES["mimo"]


def write_mtp(
    folder: Path,
    dialect: str = "speculators",
    *,
    target: TargetFacts,
    model_type: str = "qwen3",
    gated: bool = False,
    whole: bool = False,
    **fields: Any,
) -> Path:
    """One module; with `whole` among the tensors of the model that it belongs to."""
    draw, hidden = Drawing(), target.hidden
    prefixes = {"deepseek": f"model.layers.{target.layers}.", "qwen": "mtp.", "mimo": "model.mtp_layers.0."}
    prefix = prefixes.get(dialect, "mtp_layers.0.")
    product, of_hidden, of_embedding, last, inner = _MTP_NAMES[dialect]
    tensors = {f"{prefix}{product}.weight": draw(hidden, 2 * hidden)}
    tensors |= {f"{prefix}{x}.weight": draw(hidden, mean=1.0) for x in (of_hidden, of_embedding, last)}
    layer = layer_tensors(draw, hidden, qk_norm=True, gated=gated)
    tensors |= {f"{prefix}{inner}{name}": x for name, x in layer.items()}
    if dialect == "deepseek":
        tensors |= {f"{prefix}{x}.weight": draw(target.vocab, hidden) for x in ("embed_tokens", "shared_head.head")}
    if whole:
        tensors |= load_file(target.directory / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"] = draw(FFN, hidden)
    decoder = decoder_fields(target.hidden, target.vocab, target.layers)
    if dialect == "speculators":
        return write_head(folder, {**wrapper_fields("mtp", decoder, model_type=model_type), **fields}, tensors)
    model = {"architectures": ["SomeForCausalLM"], "model_type": model_type, "num_nextn_predict_layers": 1}
    return write_head(folder, {**model, **decoder, "some_field_of_the_model": 7, **fields}, tensors)


def write_eagle1(folder: Path, *, target: TargetFacts, bias: bool = True, normed: bool = False, **fields: Any) -> Path:
    """`normed` is HASS's."""
    draw, hidden = Drawing(), target.hidden
    tensors = {f"layers.0.{name}": x for name, x in layer_tensors(draw, hidden).items()}
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"], tensors["embed_tokens.weight"] = draw(hidden, 2 * hidden), draw(target.vocab, hidden)
    if bias:
        tensors["fc.bias"] = draw(hidden)
    if normed:
        tensors |= {f"{x}_layernorm.weight": draw(hidden, mean=1.0) for x in ("embedding", "hidden_states")}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **decoder_fields(hidden, target.vocab)}
    return write_head(folder, {**config, **({} if bias else {"bias": False}), **fields}, tensors)


def write_medusa(
    folder: Path, dialect: str = "medusa", *, target: TargetFacts, blocks: int = 1, draft_vocab: int = 0, **fields: Any
) -> Path:
    """Of three heads. The authors' file is a pickle, of a configuration that says 2."""
    draw, hidden, rows = Drawing(), target.hidden, draft_vocab or target.vocab
    tensors: dict[str, Tensor] = {}
    for i in range(3):
        for j in range(blocks):
            name = f"{i}.{j}.linear" if dialect == "medusa" else f"blocks.{i}.layers.{j}"
            tensors[f"{name}.weight"] = draw(hidden, hidden)
            if dialect == "medusa":
                tensors[f"{name}.bias"] = draw(hidden)
        tensors[f"{i}.{blocks}.weight" if dialect == "medusa" else f"lm_heads.{i}.weight"] = draw(rows, hidden)
    if draft_vocab:
        tensors["token_map"] = vocabulary_tensors(draft_vocab, target.vocab)["d2t"] + torch.arange(draft_vocab)
    if dialect == "vllm":
        own = {"num_heads": 3, "num_hidden_layers": blocks, "medusa_fc_bias": False}
        reduced = {"truncated_vocab_size": draft_vocab} if draft_vocab else {}
        shape = {"hidden_size": hidden, "vocab_size": target.vocab}
        config = {"model_type": "medusa", "architectures": ["MedusaModel"], **shape, **own, **reduced}
        return write_head(folder, {**config, **fields}, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    own = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "some/model"}
    write_config(folder, {**own, **fields})
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(head: Path, target: TargetFacts) -> str:
    """Why it cannot be read, in one line."""
    with pytest.raises((ModelError, ParameterError)) as caught:
        read_head(head, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)
