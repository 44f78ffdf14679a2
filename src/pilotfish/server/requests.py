"""The bodies that clients send. A field that is not here is refused, and so is one of OpenAI's that has no effect here
but would have one there."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from pilotfish.config import MetricsLevel, Mode

#: Fields of OpenAI's and vLLM's APIs that are not supported, with the values of them that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "beam_width": (None, 1),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "best_of": (None,),  # but of CompletionRequest, as is the next one
    "add_special_tokens": (None, False),  # a chat template has its own
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "logits_processors": (None,),
    "mm_processor_kwargs": (None,),
    "priority": (None, 0),
}
#: Fields that are about the client's bookkeeping, not about the output; whatever they hold.
HARMLESS = {"user", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
#: What may stand where msgspec does not say it.
ALLOWED = {
    "role": "system, developer, user or assistant",
    "type": "text",
    "mode": "off, sync or async",
    "metrics": "none, summary or detailed",
}


class Speculation(Struct, forbid_unknown_fields=True):
    """How to speculate for a request, within what the server does. Never changes the output."""

    mode: Mode | None = None  # off, or the server's own
    max_nodes: int | None = None  # of a tree
    metrics: MetricsLevel | None = None
    detail: bool | None = None  # each event of a stream says what was speculated


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chats have in common. None: as if it was not there."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
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
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds
    speculation: Speculation | None = None
    user: Any = None
    metadata: Any = None  # of it, `tag` labels metrics
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a text, tokens, or a list of either
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None  # n
    add_special_tokens: bool | None = None  # to a text, those that the tokenizer puts around one

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
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[None] | None = None
    annotations: list[None] | None = None

    @property
    def text(self) -> str:
        """All parts of it."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True  # of a prompt; a chat template has its own
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]
