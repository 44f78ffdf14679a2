"""Checkpoints of models that also read images: the text model is served. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pilotfish.errors import ModelError

MULTIMODAL = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration", "Qwen3VLForConditionalGeneration")
#: How names of the text model's tensors begin in files, and how in the text model alone.
_TEXT = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
#: How other parts' begin, maybe after "model.".
_OTHERS = ("vision_tower.", "multi_modal_projector.", "visual.")
#: Fields that stand beside text_config and are about the text.
_BESIDE = ("eos_token_id", "tie_word_embeddings")


def text_config(config: Any, fields: Mapping[str, Any], directory: Path) -> Any:
    """With `text_of`, the architecture around it. ModelError if there is none."""
    text = getattr(config, "text_config", None)
    if fields.get("quantization_config"):
        raise ModelError(
            f"model: {directory} is a quantized {config.architectures[0]}; its weights must not be quantized"
        )
    if text is None or isinstance(text, Mapping):  # of another class's configuration
        raise ModelError(f"model: {directory} has no text_config of its model_type, as {config.architectures[0]} needs")
    if text.model_type == "qwen3_vl_text":  # the three axes of its positions are equal on texts
        rope = {name: value for name, value in text.rope_parameters.items() if not name.startswith("mrope_")}
        text = Qwen3Config(**{**text.to_dict(), "model_type": Qwen3Config.model_type, "rope_parameters": rope})
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type, text.model_type)]
    text.text_of = config.architectures[0]
    for name in _BESIDE:
        if fields.get(name) is not None:
            setattr(text, name, fields[name])
    return text


def text_name(name: str, config: Any) -> str | None:
    """A tensor's name in the text model of `load_config`; None if it is another part's."""
    if not hasattr(config, "text_of"):
        return name
    if name.removeprefix("model.").startswith(_OTHERS):
        return None
    begin = next((begin for begin in _TEXT if name.startswith(begin)), "")
    return _TEXT.get(begin, "") + name.removeprefix(begin)
