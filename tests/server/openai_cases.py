"""Requests of the official client, with a fixed seed, and their expected answers in each mode."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support import SNIPPETS

MODEL = "tiny"
EOS = 0  # the tiny tokenizer's
BYTES = ("Ã", "©")  # tokens: the two bytes of é as a byte-level vocabulary writes them


@dataclass(frozen=True)
class Stop:
    """Stop strings that are made of what the request gives without them: `pick(text, tokens)`."""

    pick: Callable[[str, list[str]], str | list[str]]


@dataclass(frozen=True)
class Case:
    chat: bool
    name: str
    asked: dict[str, Any] = field(compare=False, hash=False)

    @property
    def outputs(self) -> int:
        prompt = self.asked.get("prompt")
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return (self.asked.get("n") or 1) * (len(prompt) if several else 1)

    @property
    def drafts(self) -> bool:
        """Whether the answer tells of drafts, where the server has some."""
        speculation = self.asked.get("speculation", {})
        told = speculation.get("metrics") != "none" and speculation.get("mode") != "off"
        return self.outputs == 1 and told and speculation.get("max_nodes") != 0 and self.asked["max_tokens"] != 0

    @property
    def typed(self) -> bool:
        """Whether the client's own types allow the whole answer: they know no null for the log-probability of a
        prompt's first token, as OpenAI gives it."""
        return not (self.asked.get("echo") and "logprobs" in self.asked)

    def __str__(self) -> str:
        return f"{'chat' if self.chat else 'completion'}-{self.name}"


def whole_characters(text: str, tokens: list[str], *, spanning: bool) -> str:
    """Three characters from the text's middle on, that are in none of its tokens where `spanning`."""
    found = (text[at : at + 3] for at in range(len(text) // 3, len(text) - 3))
    return next(s for s in found if "\ufffd" not in s and not (spanning and any(s in token for token in tokens)))


INSIDE = Stop(lambda text, tokens: whole_characters(text, tokens, spanning=False)[0])
SPANNING = Stop(lambda text, tokens: whole_characters(text, tokens, spanning=True))
LIST = Stop(lambda text, tokens: ["never, never", whole_characters(text, tokens, spanning=True), text[-3:]])

SAMPLED: dict[str, Any] = {"temperature": 0.8}
GREEDY: dict[str, Any] = {"temperature": 0}
PENALTIES: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": -1.0, "repetition_penalty": 1.3}
ENDLESS: dict[str, Any] = {**SAMPLED, "logit_bias": {str(EOS): 9.0}, "ignore_eos": True}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
ENDING: dict[str, Any] = {**SAMPLED, "logit_bias": {str(EOS): 9.0}, "max_tokens": 64}
SPANNED: dict[str, Any] = {**SAMPLED, "stop": SPANNING, "max_tokens": 48}
STOP_TOKEN: dict[str, Any] = {**SAMPLED, "stop_token_ids": list(range(40, 56)), "max_tokens": 64}

#: Fields of completions by the name of their case, over max_tokens 24, seed 7 and a text as the prompt.
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy-long": {**GREEDY, "max_tokens": 96, "prompt": SNIPPETS[3]},
    "sampled": SAMPLED,
    "sampled-long": {**SAMPLED, "max_tokens": 96, "prompt": SNIPPETS[4]},
    "seed-largest": {**SAMPLED, "seed": 2**64 - 1},
    "hot": {"temperature": 1.7},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.05},
    "filters": {**SAMPLED, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "presence": {**GREEDY, "presence_penalty": 1.5, "max_tokens": 48},
    "frequency": {**SAMPLED, "frequency_penalty": 1.0, "max_tokens": 48},
    "repetition": {**GREEDY, "repetition_penalty": 1.3, "max_tokens": 48},
    "penalties": {**SAMPLED, **PENALTIES, "max_tokens": 64},
    "logit-bias": {**SAMPLED, "logit_bias": {"33": 2.0, "77": -9.0, "101": 4.0}},
    "allowed": {"allowed_token_ids": list(range(20, 120))},
    "bad-words": {**GREEDY, "bad_words": ["return", "self."]},
    "n": {**SAMPLED, "n": 3},
    "n-logprobs": {**SAMPLED, "n": 3, "logprobs": 2},
    "n-prompts": {**SAMPLED, "n": 2, "prompt": list(SNIPPETS[:3])},
    "best-of-n": {**SAMPLED, "n": 2, "best_of": 2},
    "echo": {**SAMPLED, "echo": True},
    "echo-unicode": {**SAMPLED, "echo": True, "prompt": SNIPPETS[6]},
    "echo-logprobs": {**SAMPLED, "echo": True, "logprobs": 3},
    "echo-logprobs-long": {**SAMPLED, "echo": True, "logprobs": 0, "prompt": "".join(SNIPPETS) * 5},
    "echo-tokens": {**SAMPLED, "echo": True, "prompt": [45, 80, 121, 300, 9]},
    "echo-only": {"echo": True, "max_tokens": 0},
    "echo-only-logprobs": {"echo": True, "max_tokens": 0, "logprobs": 2, "prompt": SNIPPETS[2]},
    "logprobs-0": {**GREEDY, "logprobs": 0},
    "logprobs-5": {**SAMPLED, "logprobs": 5},
    "logprobs-filters": {**SAMPLED, "logprobs": 4, "top_k": 3, "presence_penalty": 1.0},
    "logprobs-unicode": {**SAMPLED, "logprobs": 1, "allowed_token_ids": BYTES, "max_tokens": 40},
    "logprobs-stop": {**SAMPLED, "logprobs": 1, "stop": SPANNING, "max_tokens": 40},
    "prompt-logprobs": {**SAMPLED, "prompt_logprobs": 2},
    "tokens": {**SAMPLED, "prompt": [45, 80, 121, 300, 9, 9, 9, 77]},
    "texts": {**SAMPLED, "prompt": list(SNIPPETS)},
    "token-lists": {**SAMPLED, "prompt": [[45, 80, 121], [300, 9], [77]]},
    "long-prompt": {**GREEDY, "prompt": "".join(SNIPPETS) * 3},
    "bytes": {**SAMPLED, "allowed_token_ids": BYTES, "max_tokens": 64},
    "stop": {**SAMPLED, "stop": INSIDE},
    "stop-spanning": SPANNED,
    "stop-list": {**GREEDY, "stop": LIST, "max_tokens": 48},
    "stop-n": {**SAMPLED, "stop": INSIDE, "n": 3},
    "stop-min-tokens": {**GREEDY, "stop": INSIDE, "min_tokens": 20},
    "stop-token": STOP_TOKEN,
    "stop-shown": {**SPANNED, "include_stop_str_in_output": True},
    "stop-token-shown": {**STOP_TOKEN, "include_stop_str_in_output": True},
    "stop-tokens": {**SAMPLED, "stop_token_ids": list(range(60, 510)), "min_tokens": 9, "logprobs": 0},
    "special-shown": {**ENDLESS, "skip_special_tokens": False},
    "special-stops": {**ENDLESS, "skip_special_tokens": False, "stop": ["<eos><eos>", "os><e"], "max_tokens": 64},
    "eos-shown": {**ENDING, "skip_special_tokens": False, "include_stop_str_in_output": True},
    "eos": ENDING,
    "eos-min-tokens": {**ENDING, "min_tokens": 12},
    "eos-ignored": ENDLESS,
    "token-ids": {**SAMPLED, "return_token_ids": True},
    "token-ids-n": {**SAMPLED, "return_token_ids": True, "n": 2, "prompt": list(SNIPPETS[:2])},
    "token-ids-stop": {**SAMPLED, "return_token_ids": True, "stop": SPANNING, "max_tokens": 48},
    "token-ids-bytes": {**SAMPLED, "return_token_ids": True, "allowed_token_ids": BYTES, "max_tokens": 40},
    "token-ids-echo": {**SAMPLED, "return_token_ids": True, "echo": True},
    "logprobs-by-id": {**SAMPLED, "logprobs": 2, "return_tokens_as_token_ids": True},
    "truncated": {**SAMPLED, "prompt": "".join(SNIPPETS), "truncate_prompt_tokens": 9, "return_token_ids": True},
    "no-speculation": {**SAMPLED, "speculation": {"mode": "off"}},
    "no-metrics": {**SAMPLED, "speculation": {"metrics": "none"}},
    "no-special-tokens": {**SAMPLED, "add_special_tokens": False},
}

HELLO = {"role": "user", "content": "Say hello."}
TURNS = [
    {"role": "system", "content": "Answer in code."},
    HELLO,
    {"role": "assistant", "content": "print('hello')"},
    {"role": "user", "content": "Once more: ☃"},
]

#: The same for chats, over one message.
CHATS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "sampled-long": {**SAMPLED, "max_tokens": 96},
    "system": {**SAMPLED, "messages": TURNS[:2]},
    "turns": {**SAMPLED, "messages": TURNS},
    "n": {**SAMPLED, "n": 3},
    "n-logprobs": {**SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 1},
    "logprobs": {**SAMPLED, "logprobs": True},
    "logprobs-sampled": {**SAMPLED, "logprobs": True, "top_logprobs": 5, "max_tokens": 48},
    "logprobs-bytes": {**SAMPLED, "logprobs": True, "top_logprobs": 2, "allowed_token_ids": BYTES},
    "prompt-logprobs": {**SAMPLED, "prompt_logprobs": 1},
    "stop": {**SAMPLED, "stop": INSIDE, "max_tokens": 48},
    "stop-spanning": SPANNED,
    "stop-token": STOP_TOKEN,
    "echo": {**SAMPLED, "messages": TURNS[:3], "echo": True},
    "continued-echo": {**SAMPLED, **CONTINUED, "messages": TURNS[:3], "echo": True},
    "template-kwargs": {**SAMPLED, "chat_template_kwargs": {"tone": "Calm. "}},
    "token-ids": {**SAMPLED, "return_token_ids": True},
    "logprobs-by-id": {**SAMPLED, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
    "truncated": {**SAMPLED, "messages": TURNS, "truncate_prompt_tokens": 11, "return_token_ids": True},
    "eos": ENDING,
    "max-completion-tokens": {**SAMPLED, "max_completion_tokens": 9, "max_tokens": None},
    "bytes": {**SAMPLED, "allowed_token_ids": BYTES, "max_tokens": 64},
    "no-speculation": {**SAMPLED, "speculation": {"mode": "off"}},
    "plain-formats": {**SAMPLED, "response_format": {"type": "text"}, "tools": [], "metadata": {"a": "b"}},
}

CASES = [Case(False, name, {"max_tokens": 24, "prompt": SNIPPETS[0], **asked}) for name, asked in COMPLETIONS.items()]
CASES += [Case(True, name, {"max_tokens": 24, "messages": [HELLO], **asked}) for name, asked in CHATS.items()]


def case(name: str, *, chat: bool = False) -> Case:
    return next(each for each in CASES if each.name == name and each.chat == chat)
