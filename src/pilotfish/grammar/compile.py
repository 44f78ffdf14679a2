import json
import re
import tomllib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance import grammar_from as grammar_of

from pilotfish.core.drafting.vocabulary import without_ids_from
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.errors import ParameterError
from pilotfish.grammar.schema import SchemaError, embedded, enforced
from pilotfish.grammar.trial import Special, Trial, parser_limits, problem_of
from pilotfish.printable import one_line

#: Grammars kept in the cache, compiled or refused.
KEPT = 128
#: Characters of a regular expression, and of a grammar without its schemas: compiling may grow with the square.
MAX_REGEX, MAX_GRAMMAR = 1 << 14, 1 << 16
FIELD = "structured_outputs"
#: Characters of a message of llguidance.
MAX_REASON = 300
#: Within strings of JSON: the longest texts of tokens that are allowed, or not, together. Finer than llguidance's own
#: (10 and 30): of a string with a maximal length, these halve the mean cost of a mask over 128,000 tokens.
TOGETHER = (4, 6, 8, 10, 13, 17, 22, 30)
#: Words for messages of llguidance that need others, by a pattern of them.
WORDS: dict[str, str] = tomllib.loads(Path(__file__).with_name("messages.toml").read_text("utf-8"))
_ANGLES = re.compile(r"<.*>", re.DOTALL)
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{most}}}" for most in TOGETHER), f"{_CHARACTER}+"]


def why_no_grammar(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> str | None:
    with closing(Grammars(tokenizer, vocab_size, eos_ids)) as grammars:
        try:
            grammars.compile(Constraint.regex("a"))
        except ParameterError as error:
            return str(error).removeprefix(f"{FIELD}: ")
    return None


class Grammars:
    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's, which may exceed the tokenizer's; each of `eos_ids` ends an output."""
        self.vocab_size = vocab_size
        self._tokenizer, self._eos_ids = tokenizer, sorted(eos_ids)
        self._compiled: OrderedDict[tuple[str, str, bool], LLMatcher | str] = OrderedDict()  # used longest ago first
        self._lock = Lock()

    def close(self) -> None:
        if "_trial" in self.__dict__:  # it was needed
            self._trial.close()

    def compile(self, constraint: Constraint) -> LLMatcher:
        """A matcher at its beginning, which callers only copy. ParameterError for an invalid constraint."""
        if (known := self.known(constraint)) is not None:
            return known
        found = self._matcher_or_problem(constraint)
        with self._lock:
            self._compiled[_key(constraint)] = found
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return _served(found)

    def known(self, constraint: Constraint) -> LLMatcher | None:
        key = _key(constraint)
        with self._lock:
            if key not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            found = self._compiled[key]
        return _served(found)

    def _matcher_or_problem(self, constraint: Constraint) -> LLMatcher | str:
        try:
            grammar = _grammar(constraint)
        except ValueError as error:  # of ours, or of llguidance
            return _reason(str(error))
        if (problem := self._trial.problem(grammar)) is not None:
            return _reason(problem)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=parser_limits())
        problem = problem_of(matcher.deep_copy())
        return matcher if problem is None else _reason(problem)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return vocabulary_of(self._tokenizer, self.vocab_size, self._eos_ids, SLICES)

    @cached_property
    def _trial(self) -> Trial:
        vocabulary = self._vocabulary
        special = filter(vocabulary.is_special_token, range(vocabulary.vocab_size))
        tokens = {i: vocabulary.decode_str([i]) for i in special}
        return Trial(Special(vocabulary.vocab_size, tokens, vocabulary.eos_tokens))


def _key(constraint: Constraint) -> tuple[str, str, bool]:
    return constraint.kind, constraint.text, constraint.compact


def _served(found: LLMatcher | str) -> LLMatcher:
    if isinstance(found, str):
        raise ParameterError.described(FIELD, f"{FIELD}: {found}")
    return found


def _grammar(constraint: Constraint) -> str:
    text = constraint.text
    if constraint.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(enforced(text, compact=constraint.compact))
    if constraint.kind == "regex":
        _bounded("a regular expression", len(text), MAX_REGEX)
        return LLMatcher.grammar_from_regex(text)
    text, without = embedded(text, compact=constraint.compact)
    _bounded("a grammar without its schemas", without, MAX_GRAMMAR)
    return grammar_of("grammar", text)


def _bounded(what: str, length: int, most: int) -> None:
    if length > most:
        raise SchemaError(f"{what} of {length} characters is too long; at most {most} are allowed")


def _reason(text: str) -> str:
    text = re.split(r"\n *\d+ \||\n<", text)[0]
    if "regex parse error" in text:  # a picture of the place comes first
        text = f"the regular expression cannot be read: {text.rpartition('error: ')[2]}"
    line = next((words for pattern, words in WORDS.items() if re.search(pattern, text)), one_line(text))
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"


def vocabulary_of(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], slices: list[str]) -> LLTokenizer:
    """`tokenizer` must be fast; ParameterError if llguidance cannot read it. Entries beyond the model's `vocab_size`
    are left out.

    Special tokens stay out of texts: llguidance would force such a token where its text is the only way on, and then
    not take it. Grammars name them by id, as in `<[151657]>`."""
    described = without_ids_from(json.loads(tokenizer.backend_tokenizer.to_str()), vocab_size)
    described |= dict.fromkeys(("padding", "truncation", "post_processor"))  # they add what no text has
    for token in described["added_tokens"]:
        if token["special"] or _ANGLES.fullmatch(token["content"]):  # llguidance takes both for special
            _rename(described, token, f"\U000f0000{token['id']}\U000f0000")  # of private use: no text has it
    ends = sorted(eos_ids) or tokenizer.eos_token_id
    try:
        return LLTokenizer(json.dumps(described), n_vocab=vocab_size, eos_token=ends, slices=slices)
    except ValueError as error:
        message = f"{FIELD}: the model's tokenizer does not allow them: {one_line(str(error))}"
        raise ParameterError.described(FIELD, message) from error


def _rename(described: dict[str, Any], token: dict[str, Any], name: str) -> None:
    model, entries = described["model"], described["model"]["vocab"]
    if model.get("unk_token") == token["content"]:
        model["unk_token"] = name
    if isinstance(entries, dict):
        if token["content"] in entries:
            entries[name] = entries.pop(token["content"])
    else:  # of pieces and their scores, by id
        for entry in entries:
            if entry[0] == token["content"]:
                entry[0] = name
    token |= {"content": name, "special": True}
