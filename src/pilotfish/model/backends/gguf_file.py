import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.config.fields import GGUFWeights
from pilotfish.errors import ModelError
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.tensors import GGUF_INDEX, weight_files

#: GGUF's architecture by transformers' model type.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "f32": gguf.LlamaFileType.ALL_F32,
}
#: Fields of GGUF that name how texts are split before BPE. Prompts are given as tokens, so it is never used; but files
#: without one are refused.
SPLIT = "llama-bpe"


def gguf_of(model: Path, weights: GGUFWeights) -> Path:
    """The model's own first file, or a cached one, written on first use. ModelError for a model that cannot be
    written."""
    if (model / GGUF_INDEX).is_file():
        return weight_files(model)[0].resolve()
    cached = cache_folder("gguf") / f"{model.name}-{weights}-{digest(model)}.gguf"
    return made_once(cached, lambda made: write_gguf(model, made, weights))


def digest(model: Path) -> str:
    found = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def write_gguf(model: Path, path: Path, weights: GGUFWeights) -> None:
    config = _checked(load_config(model))
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config)
    writer.add_file_type(FILE_TYPES[weights])
    _add_vocabulary(writer, model, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for file in weight_files(model):
        for name, tensor in load_file(file).items():
            if architecture == gguf.MODEL_ARCH.LLAMA:
                tensor = _interleaved(name, tensor, config)
            _add_tensor(writer, str(names.get_name(name, try_suffixes=(".weight", ".bias"))), tensor, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _checked(config: Any) -> Any:
    kind, rope = config.model_type, config.rope_parameters
    if config.quant_method:
        raise ModelError(f"weights in {config.quant_method} are not converted to GGUF here")
    if kind not in ARCHITECTURES:
        raise ModelError(f"model type {kind} is not converted to GGUF here, only {', '.join(ARCHITECTURES)}")
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"rotary embeddings of type {rope['rope_type']} are not converted to GGUF here")
    windowed = getattr(config, "use_sliding_window", kind == "mistral") and getattr(config, "sliding_window", None)
    if windowed:
        raise ModelError("sliding windows are not converted to GGUF here")
    return config


def _add_shape(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_vocabulary(writer: Any, model: Path, size: int) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] != "BPE":
        raise ModelError(f"tokenizers of type {tokenizer['model']['type']} are not converted to GGUF here")
    names = {index: name for name, index in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {**names, **added}
    kind = gguf.TokenType
    kinds = [kind.CONTROL if i in added else kind.NORMAL if i in names else kind.UNUSED for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLIT)
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for special in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        special(next(iter(added), 0))


def _interleaved(name: str, tensor: Tensor, config: Any) -> Tensor:
    """llama.cpp's Llama rotates neighbours; transformers' rotates the first half of a head with the second."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    of_one = next((number for part, number in heads.items() if f".{part}." in name), 0)
    if not of_one:
        return tensor
    halves = tensor.reshape(of_one, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, name: str, tensor: Tensor, weights: GGUFWeights) -> None:
    """Norms and biases stay in float32, as every converter leaves them."""
    if tensor.ndim == 1 or weights == "f32":
        writer.add_tensor(name, tensor.float().numpy())
    elif weights == "f16":
        writer.add_tensor(name, tensor.half().numpy())
    else:
        raw = tensor.bfloat16().contiguous().view(torch.uint16).numpy().view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
