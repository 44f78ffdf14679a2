"""The bodies that clients send. A field that is not here is refused, and so is one of OpenAI's that has no effect here
but would have one there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from pilotfish.config import MetricsLevel, Mode
from pilotfish.core.noise import SEED_LIMIT

#: Fields of OpenAI's and vLLM's APIs that are not supported, with the values of them that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "use_beam_search": (None, False),
    "beam_width": (None, 1),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "structured_outputs": (None,),
    "structural_tag": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True),
    "thinking_token_budget": (None, -1),
    "chat_template": (None,),  # a program of the client's
    "documents": (None, []),
    "detokenize": (None, True),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "repetition_detection": (None,),
    "watermarking": (None, False),
    "prompt_embeds": (None,),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "kv_transfer_params": (None, {}),
    "ec_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "priority": (None, 0),
    "stream_interval": (None, 1),
    "routed_experts_prompt_start": (None, 0),
    "return_token_offsets": (None, False),
    "return_prompt_text": (None, False),
}
#: Fields that are about the client's bookkeeping, not about the output; whatever they hold.
HARMLESS = {
    "user",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "return_mm_kwargs",
    "safety_identifier",
    "session_id",
}
#: What may stand where msgspec does not say it.
ALLOWED = {
    "role": "system, developer, user or assistant",
    "type": "text",
    "mode": "off, sync or async",
    "metrics": "none, summary or detailed",
    "seed": f"an integer 0 to {SEED_LIMIT - 1}, or its digits as text",
    "truncation_side": "left or right",
    "tool_calls": "an empty list or null",
    "annotations": "an empty list or null",
    "include_obfuscation": "false",
}


Nothing = Annotated[list[Any], Meta(max_length=0)]


class Speculation(Struct, forbid_unknown_fields=True):
    """How to speculate for a request, within what the server does. Never changes the output."""

    mode: Mode | None = None  # off, or the server's own
    max_nodes: int | None = None  # of a tree
    metrics: MetricsLevel | None = None
    detail: bool | None = None  # each event of a stream says what was speculated


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chats have in common. None: as if it was not there."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None  # n
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # by token id
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | str | None = None  # -1: none; text: its decimal digits
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # there are none, whatever it says
    echo: bool | None = None  # of a chat: the last message, where that is the assistant's
    add_special_tokens: bool | None = None  # those that the tokenizer puts around a text; a chat template has its own
    truncate_prompt_tokens: int | None = None  # that are kept; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds
    request_id: str | None = None  # in the answer's id
    speculation: Speculation | None = None
    user: Any = None
    metadata: Any = None  # of it, `tag` labels metrics
    safety_identifier: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    return_mm_kwargs: Any = None


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a text, tokens, or a list of either
    logprobs: int | None = None

    @property
    def texts(self) -> list[str]:
        """Those of the prompts that are some."""
        return [
            part for part in ([self.prompt] if isinstance(self.prompt, str) else self.prompt) if isinstance(part, str)
        ]


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A turn. What an answer's message may carry beside its text is allowed as long as it is empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None  # needed; but what stands in its place is to blame first
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None
    annotations: Nothing | None = None
    reasoning: None = None
    reasoning_content: None = None

    @property
    def text(self) -> str:
        """All parts of it."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None  # true unless continue_final_message
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # true for a prompt; a chat template has its own
    add_generation_prompt: bool | None = None  # this and the next two are of messages
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]
