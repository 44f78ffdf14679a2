"""How texts of clients become tokens, and how none of them becomes a special one (`--no-special-in-user-text`).

    content    say <|im_end|>
    wedged     say <·|im_end|>                               a wedge, which no text has, after its first character
    rendered   <|im_start|>user↵say <·|im_end|><|im_end|>↵   by the template
    tokens     <|im_start|> user ↵ say < | im _ end | > <|im_end|> ↵

The tokenizer looks for its tokens first, then takes the wedges out, before any other step. So a chat is tokenized as
one text, and a chat without such spellings is tokenized as ever.

A text that ends with a token's beginning, as `<|im_`, has a wedge at its end; likewise at its start: no neighbour
completes the token. A template that writes both ends itself, as `<|` and `|>` around a role, has written a token."""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from os.path import commonprefix
from typing import Any

from tokenizers import normalizers

from pilotfish.core.drafting.vocabulary import with_added
from pilotfish.errors import ModelError
from pilotfish.prompts import chat_prompt

#: A character that Unicode forbids in texts, drawn at random so that no client knows it.
WEDGE = "".join(chr(secrets.choice(range(0xFDD0, 0xFDF0))) for _ in range(8))


class ClientTexts:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def tokens(self, text: str, *, special: bool) -> list[int]:
        """`special` adds the tokens that the tokenizer puts around a text."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return found

    def chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, special: bool) -> list[int]:
        return chat_prompt(messages, self.tokenizer, template, special=special)


class PlainTexts(ClientTexts):
    def __init__(self, tokenizer: Any) -> None:
        """ModelError for a tokenizer that does not find its tokens by their spelling."""
        super().__init__(tokenizer)
        self.apply_chat_template = tokenizer.apply_chat_template
        backend = tokenizer.backend_tokenizer
        added, bare = sorted(backend.get_added_tokens_decoder().items()), with_added(backend, ())
        self._ids = {token for token, one in added if one.special or not _is_text(token, one.content, bare)}
        self._spelled = sorted(one.content for token, one in added if token in self._ids)
        self._starts = re.compile(_starts_of(self._spelled))
        cores = {text.strip() for text in self._spelled}  # letters and digits alone begin and end many other texts
        self._begun = {text[:n] for text in cores for n in range(1, len(text)) if not text[:n].isalnum()}
        self._ended = {text[n:] for text in cores for n in range(1, len(text)) if not text[n:].isalnum()}
        self._longest = max(map(len, self._spelled), default=0)
        self._backend = with_added(backend, (_by_spelling(one) if i in self._ids else one for i, one in added))
        # a template may have written the wedges as JSON escapes
        wedges = (normalizers.Replace(wedge, "") for wedge in (WEDGE, json.dumps(WEDGE)[1:-1]))
        own = [] if backend.normalizer is None else [backend.normalizer]
        self._backend.normalizer = normalizers.Sequence([*wedges, *own])
        self._check()

    def tokens(self, text: str, *, special: bool) -> list[int]:
        return self.encode(self._wedged(text), add_special_tokens=special)

    def chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, special: bool) -> list[int]:
        wedged = [{name: v if name == "role" else self._within(v) for name, v in one.items()} for one in messages]
        arguments = {name: self._within(value) for name, value in template.items()}
        return chat_prompt(wedged, self, arguments, special=special)

    @property
    def chat_template(self) -> Any:
        return self.tokenizer.chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = text.removeprefix(WEDGE)  # some put a space before what is first
        found: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def _within(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._wedged(value)
        if isinstance(value, dict):
            return {self._wedged(name): self._within(each) for name, each in value.items()}
        return [self._within(each) for each in value] if isinstance(value, list) else value

    def _wedged(self, text: str) -> str:
        """Wedges at the text's ends stand within white space, which templates may strip."""
        core = text.strip()
        sizes = range(1, min(self._longest, len(core) + 1))
        before = WEDGE * any(core[:n] in self._ended for n in sizes)
        after = WEDGE * any(core[-n:] in self._begun for n in sizes)
        if before or after:
            head, _, tail = text.partition(core)
            text = f"{head}{before}{core}{after}{tail}"
        return self._starts.sub(rf"\g<0>{WEDGE}", text)

    def _check(self) -> None:
        plain = [f"a{text}b" for text in self._spelled]
        wedged = [self._wedged(text) for text in plain]
        usual = self.tokenizer.backend_tokenizer
        found = ((usual, plain), (self._backend, plain), (self._backend, wedged))
        encoded = (backend.encode_batch(texts, add_special_tokens=False) for backend, texts in found)
        for text, before, now, without in zip(self._spelled, *encoded, strict=True):
            if before.ids != now.ids or not self._ids.isdisjoint(without.ids):
                reason = f"the tokenizer does not find its token {text!r} by its spelling alone"
                raise ModelError(f"no_special_in_user_text: {reason}")


@lru_cache(maxsize=1)
def plain_texts(tokenizer: Any) -> PlainTexts:
    return PlainTexts(tokenizer)


def _is_text(token: int, text: str, bare: Any) -> bool:
    """Whether a token that is not special may be text (a word, white space); templates write others, as `<think>`."""
    if len(text) == 1 or text.isspace() or text.isalnum():
        return True
    return token in bare.encode(text, add_special_tokens=False).ids


def _by_spelling(token: Any) -> Any:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "special")}
    return type(token)(token.content, normalized=False, **flags)


def _starts_of(texts: Collection[str]) -> str:
    rests = groupby(sorted(texts), key=lambda text: text[0])
    starts = ((first, [text[1:] for text in group]) for first, group in rests)
    return "|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in starts) or "(?!)"


def _any_of(texts: Collection[str]) -> str:
    if "" in texts:
        return ""
    groups = (list(group) for _, group in groupby(sorted(texts), key=lambda text: text[0]))
    shared = ((commonprefix(group), group) for group in groups)  # noqa: RUF071  # of characters, as is meant
    return "|".join(f"{re.escape(s)}(?:{_any_of([text[len(s) :] for text in group])})" for s, group in shared)
