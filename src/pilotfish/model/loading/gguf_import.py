"""GGUF files as model directories: transformers' config.json and tokenizer, links to the files, and an index of their
tensors by the names that the model's modules have."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as Splits
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pilotfish.errors import ModelError
from pilotfish.model.loading.checkpoint import meta_module
from pilotfish.model.loading.gguf_blocks import BLOCKS
from pilotfish.model.loading.metadata import one_line, quiet
from pilotfish.model.loading.tensors import GGUF_INDEX, GGUFTensor, linked_name

logger = logging.getLogger(__name__)

#: By GGUF's names; whether llama.cpp rotates neighbours in a head, so that rows of queries and keys lie in pairs.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "gemma3": False}
PLAIN = ("F32", "F16", "BF16")
#: A tensor of factors by which Llama 3.1 and later stretch rotations, and what transformers calls the same.
ROPE = "rope_freqs.weight"
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_directory(files: Sequence[Path], made: Path) -> None:
    """ModelError names the file, and what is wrong with it."""
    logger.info("%s: its config, tokenizer and tensors are read, once", files[0])
    made.mkdir()
    links = [made / linked_name(place, file) for place, file in enumerate(files)]
    for link, file in zip(links, files, strict=True):
        link.symlink_to(file.resolve())
    readers = [_reader(file) for file in files]
    told = readers[0].fields

    def field(name: str) -> Any:
        return told[name].contents() if name in told else None

    kind = field("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(f"model: {files[0]}: general.architecture: {kind!r}; supported are {', '.join(ARCHITECTURES)}")
    if "tokenizer.ggml.tokens" not in readers[0].fields:
        raise ModelError(f"model: {files[0]} has no tokenizer (tokenizer.ggml.tokens)")
    config = _transformed(AutoConfig, links[0], files[0])
    found = {str(tensor.name): (place, tensor) for place, one in enumerate(readers) for tensor in one.tensors}
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.tie_word_embeddings = "output.weight" not in found
    config.head_dim = field(f"{kind}.attention.key_length") or config.hidden_size // config.num_attention_heads
    unscaled = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scale_linear": 1.0}
    for name, served in {**unscaled, "rope.dimension_count": config.head_dim}.items():
        if field(f"{kind}.{name}") not in (None, served):
            given = f"{kind}.{name}: {field(f'{kind}.{name}')!r}"
            raise ModelError(f"model: {files[0]}: {given} is not supported, only {served!r}")
    if ROPE in found:
        _stretch(config, found.pop(ROPE)[1].data, files[0])
    index = _index(found, kind, config, files)
    _tokenizer(links[0], files[0], field).save_pretrained(made)
    fields = {**config.to_dict(), "quantization_config": {"quant_method": "gguf"}}
    (made / "config.json").write_text(json.dumps(fields, indent=1, default=str))
    (made / GGUF_INDEX).write_bytes(msgspec.json.encode(index))
    ends = {field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")}
    generation = {"eos_token_id": sorted(ends - {None})}
    (made / "generation_config.json").write_text(json.dumps(generation))


def _reader(file: Path) -> Any:
    import gguf  # slow

    try:
        return gguf.GGUFReader(file)
    except Exception as error:  # those of a damaged file have no common base
        raise ModelError(f"model: {file} cannot be read as GGUF: {one_line(error)}") from error


def _transformed(what: Any, link: Path, file: Path) -> Any:
    """Of the link, beside which lies nothing that transformers would take instead."""
    try:
        with quiet():
            return what.from_pretrained(link.parent, gguf_file=link.name)
    except Exception as error:  # as above
        raise ModelError(f"model: {file}: {what.__name__.removeprefix('Auto').lower()}: {one_line(error)}") from error


def _tokenizer(link: Path, file: Path, field: Callable[[str], Any]) -> Any:
    """As llama.cpp splits texts, and begins them where the file does not say whether."""
    tokenizer, split = _transformed(AutoTokenizer, link, file), field("tokenizer.ggml.pre")
    backend, bos = tokenizer.backend_tokenizer, tokenizer.bos_token
    if split == "smollm":
        backend.pre_tokenizer = Splits([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif split not in (None, "default", "gpt-2", *GGUF_PRE_TOKENIZER_SPLITS):
        raise ModelError(f"model: {file}: tokenizer.ggml.pre: {split!r} is not known")
    if split == "llama-bpe" and field("tokenizer.ggml.add_bos_token") is None:
        own = [(bos, tokenizer.bos_token_id)]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=own)
    return tokenizer


def _stretch(config: Any, factors: Any, file: Path) -> None:
    """ModelError for factors that transformers has no name for."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = torch.from_numpy(factors.copy()).float()
    theta = config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    for factor in (8.0, 32.0):
        config.rope_parameters = {**_LLAMA3, "rope_theta": theta, "factor": factor}
        if torch.allclose(plain / given, ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0], rtol=1e-4):
            return
    raise ModelError(f"model: {file}: tensor {ROPE} is of none that Llama 3 has, which alone are supported")


def _index(
    found: Mapping[str, tuple[int, Any]], kind: str, config: Any, files: Sequence[Path]
) -> dict[str, GGUFTensor]:
    import gguf

    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names, index = gguf.get_tensor_name_map(architecture, config.num_hidden_layers), dict[str, GGUFTensor]()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    left = dict(found)
    for name, parameter in meta_module(config).named_parameters():
        own = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if own not in left:
            raise ModelError(f"model: {files[0]} lacks tensor {own}, which its architecture needs")
        place, tensor = left.pop(own)
        shape, type_name = tuple(int(size) for size in reversed(tensor.shape)), str(tensor.tensor_type.name)
        if shape != parameter.shape:
            needed = f"shape {list(shape)}; {list(parameter.shape)} is needed"
            raise ModelError(f"model: {files[place]}: tensor {own} has {needed}")
        if type_name not in (*PLAIN, *BLOCKS):
            allowed = ", ".join((*PLAIN, *BLOCKS))
            raise ModelError(f"model: {files[place]}: tensor {own} is of type {type_name}; supported are {allowed}")
        paired = next((count for part, count in heads.items() if f".{part}." in name), 0) if ARCHITECTURES[kind] else 0
        less_one = kind.startswith("gemma") and name.endswith("norm.weight")
        index[name] = GGUFTensor(place, int(tensor.data_offset), shape, type_name, paired, less_one)
    for other, (place, _) in left.items():
        raise ModelError(f"model: {files[place]}: tensor {other} has no place in its architecture")
    return index
