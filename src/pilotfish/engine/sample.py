from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.engine.token_table import token_bytes
from pilotfish.errors import EngineError, InputError, ParameterError
from pilotfish.wire.serving import Delta, Finish, PartialOutput, Verified

#: Last tokens of a prompt that a decoder needs to continue its text.
CONTEXT = 6
DEFAULTS = SamplingParams()
#: The beginning of a character of UTF-8 at the end of bytes, which more bytes could complete (Unicode's table 3-7).
BEGUN_CHARACTER = re.compile(
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)


class Sample:
    """Times are seconds of `perf_counter`."""

    def __init__(self, index: int, request: Request, text: TextStream) -> None:
        self.index = index
        self.request_id = request.group  # one for all samples of a prompt; a server sets its own
        self.owner: Any = None  # whose it is, to whoever submitted it
        self.request = request
        self.stream = text
        self.started = time.perf_counter()
        self.seconds = 0.0  # from submission to the last token
        self.told_handovers = 0  # how many deltas told of
        self.resumed = False  # and has no tokens of its own yet
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []  # of every prompt token but the first
        self.finish_reason: FinishReason | None = None

    def resume(self, output: PartialOutput) -> None:
        """ParameterError if it has ended."""
        self.token_ids = self.request.extend(output.tokens)
        if self.request.finish_reason is not None:
            found = f"output {output.index} of {len(output.tokens)} tokens"
            raise ParameterError("resumed", found, f"one that has not ended: this ends at token {len(self.token_ids)}")
        self.read(self.token_ids)
        self.request.num_scored = output.scored
        self.resumed = bool(output.tokens)
        self.stream.take()
        self.stream.take_ends()

    def read(self, tokens: Sequence[int]) -> None:
        """Into text, where the request did not look for stop strings in it as it got them."""
        if self.request.stop_detector is None:
            for token in tokens:
                self.stream.add(token)

    @property
    def queued(self) -> float | None:
        """Seconds from submission to the first step that had rows of it."""
        return None if self.request.admitted is None else self.request.admitted - self.started

    def add(self, commit: RequestCommit, at: float) -> Delta:
        tokens = commit.tokens
        first = bool(tokens) and not self.token_ids  # while a prompt is scored there are none yet
        self.token_ids.extend(tokens)
        self.logprobs.extend(commit.logprobs)
        self.prompt_logprobs.extend(commit.prompt_logprobs)
        handovers = self.request.stats.handovers[self.told_handovers :]
        self.told_handovers += len(handovers)
        return Delta(
            id=self.request_id,
            index=self.index,
            tokens=tokens,
            text=self.stream.take(),
            ends=self.stream.take_ends(),
            verified=[self._verified(commit, at)] if tokens else [],
            logprobs=list(commit.logprobs),
            prompt_logprobs=list(commit.prompt_logprobs),
            seed=self.request.seed if first else None,
            queued=self.queued if first else None,
            cached=dict(self.request.stats.cached_by_tier) if first else {},
            handovers=handovers,
            finish=None if self.finish_reason is None else Finish(self.finish_reason, self.stop),
        )

    def _verified(self, commit: RequestCommit, at: float) -> Verified:
        resumed, self.resumed = self.resumed, False
        counts = (len(commit.tokens), commit.nodes, commit.accepted)
        return Verified(at, *counts, commit.origins, resumed, commit.depth, commit.late, commit.sharing)

    def finish(self, reason: FinishReason) -> None:
        self.stream.finish()
        self.finish_reason = reason
        self.seconds = time.perf_counter() - self.started

    @property
    def text(self) -> str:
        return self.stream.text

    @property
    def stop(self) -> str | int | None:
        if self.finish_reason is not FinishReason.STOP or self.stream.stop is not None:
            return self.stream.stop
        return self.token_ids[-1] if self.token_ids[-1] in self.request.params.stop_token_ids else None

    @property
    def error(self) -> EngineError | InputError | None:
        if self.finish_reason is not FinishReason.ERROR:
            return None
        length, grammar = len(self.request.tokens), self.request.grammar
        if grammar is not None and grammar.problem is not None:
            message = f"structured_outputs: after token {length}: {grammar.problem}"
            return ParameterError.described("structured_outputs", message)
        other = "" if grammar is None else ", or grammar and parameters together leave no token"
        reason = f"those after token {length} are not finite (NaN or infinity){other}; none can be sampled"
        return EngineError(f"logits: {reason}")

    def stats(self) -> dict[str, Any]:
        stats, tokens = self.request.stats, len(self.token_ids)
        return {
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if self.seconds else 0.0,
            "verify_steps": stats.verify_steps,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "accepted_by_origin": dict(stats.accepted_by_origin),
            "hits": stats.hits,
            "cached_by_tier": dict(stats.cached_by_tier),
            "handovers": [report.as_json() for report in stats.handovers],
            "tokens_per_verify_step": tokens / stats.verify_steps if stats.verify_steps else 0.0,
        }


def check_resumed(outputs: Sequence[PartialOutput], params: SamplingParams, vocab_size: int) -> None:
    indices = [output.index for output in outputs]
    if not indices or len(set(indices)) < len(indices) or max(indices) >= params.n:
        raise ParameterError("resumed", indices, f"different outputs of 0 to {params.n - 1}")
    if params.seed is None:
        raise ParameterError("seed", None, "the seed of the outputs that are resumed")
    for token in (token for output in outputs for token in output.tokens):
        if not 0 <= token < vocab_size:
            raise ParameterError("resumed", token, f"token ids 0 to {vocab_size - 1}")


class TextStream:
    """Token ids to text, a piece at a time: never half a character, never part of a stop string.

    text     print("a")\\nif __na        `text` holds what was decoded so far,
    safe     print("a")\\n               `take` gives it up to where a stop string may have begun
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams = DEFAULTS,
        stop_ids: Collection[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """Some decoders drop the space before a text's first word, so they need the `prompt`."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._params = params
        self._stop_ids = stop_ids
        self._shows_stop = params.include_stop_str_in_output
        self._decoder = self._decoder_after(self._end_of(prompt))
        self._pending: list[int] = []  # ids whose bytes do not end on a character yet
        self._forced = params.min_tokens  # tokens to come that end nothing
        self._taken = 0
        self._ends: list[int] = []  # [tokens not yet taken] characters of `text` after each token
        self.text = ""
        self.ended = False
        self.stop: str | None = None  # the stop string that ended it

    def add(self, token: int) -> bool:
        completes_stop = self._append(token)
        self._ends.append(len(self.text))
        return completes_stop

    def _append(self, token: int) -> bool:
        if token in self._stop_ids and not self._shows_stop:
            return False
        self._pending.append(token)
        piece = self._decode_last()
        self._forced -= 1
        if not piece:
            return False
        self._pending.clear()
        before, self.text = len(self.text), self.text + piece
        return self._cut(before)

    def _decode_last(self) -> str | None:
        try:
            return self._decoder.step(self._backend, self._pending[-1])
        except Exception:  # the token changes earlier text; tokenizers has no narrower type for this
            self._decoder = self._decoder_after(self._pending[-1:])
            return self._decode(self._pending)

    def _decoder_after(self, tokens: list[int]) -> DecodeStream:
        return DecodeStream(ids=tokens, skip_special_tokens=self._params.skip_special_tokens)

    def _cut(self, before: int) -> bool:
        if self._forced >= 0:
            return False
        starts = ((self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._params.stop)
        found = [(start, stop) for start, stop in starts if start >= 0]
        if found:
            start, self.stop = min(found)
            end = start + len(self.stop) if self._shows_stop else start
            self.text, self.ended = self.text[:end], True
        return self.ended

    def finish(self) -> None:
        """Pending whole characters become text, other bytes replacement characters, except a begun one at the end."""
        if not self.ended and self._pending:
            before = len(self.text)
            self.text += self._whole_characters(self._pending)
            self._cut(before)
            if self._ends:
                self._ends[-1] = len(self.text)
        self._pending.clear()
        self.ended = True

    def _whole_characters(self, tokens: Sequence[int]) -> str:
        added = self._backend.get_added_tokens_decoder() if self._params.skip_special_tokens else {}
        hidden = {token for token, one in added.items() if one.special}
        bytes_of, shown = token_bytes(self._tokenizer), [token for token in tokens if token not in hidden]
        found = BEGUN_CHARACTER.search(b"".join(map(bytes_of, shown)))
        begun = 0 if found is None else len(found[0])
        while begun and (size := len(bytes_of(shown[-1]))) <= begun:
            shown.pop()
            begun -= size
        text = self._decode(shown)
        return text.removesuffix("\ufffd") if begun else text  # the last token ends a character, and begins one

    def take(self) -> str:
        """The text not yet taken that no stop string can still swallow."""
        awaited = () if self.ended or self._shows_stop else self._params.stop
        end = len(self.text) - max(map(self._begun, awaited), default=0)
        piece = self.text[self._taken : end]
        self._taken += len(piece)
        return piece

    def take_ends(self) -> list[int]:
        """For each token since the last call, the length of the whole text after it."""
        ends, self._ends = self._ends, []
        return ends

    def _begun(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self.text)), 0, -1)
        return next((size for size in sizes if self.text.endswith(stop[:size])), 0)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Tokens from which a decoder can go on; none if they do not end on a character."""
        end = list(prompt[-CONTEXT:])
        return [] if self._decode(end).endswith("\ufffd") else end

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._params.skip_special_tokens))
