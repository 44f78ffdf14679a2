"""Of completions and of chats, whose chunks have one piece each: content, reasoning, arguments of a call, or a call's
beginning."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Raw, Struct

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.engine.token_table import TextStream
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning, content_of, joined
from pilotfish.server.answers.formats import LEAST, AnswerFormat, OutputBuffer, Part, TokenNames, chat_logprob
from pilotfish.server.bodies.params import TokenizedPrompt
from pilotfish.server.http_errors import encode


class TextLogprob(Struct, frozen=True):
    token: str
    logprob: float | None = None
    top: Raw | None = None


def text_logprob(entry: TokenLogprobs, names: TokenNames) -> TextLogprob:
    likeliest = (*entry.top, (entry.token, entry.logprob))
    top = {names(token)[0]: max(logprob, LEAST) for token, logprob in likeliest}
    return TextLogprob(names(entry.token)[0], max(entry.logprob, LEAST), Raw(encode(top)))


class EchoedPrompt:
    def __init__(self, prompt: TokenizedPrompt, tokenizer: Any, names: TokenNames) -> None:
        self._names = names
        # a text lacks the special tokens that the tokenizer put around it
        self._text = TextStream(tokenizer, SamplingParams(skip_special_tokens=prompt.text is not None))
        self.starts = list[int]()  # characters before each token
        self.logprobs = list[TextLogprob]()
        self._append(prompt.tokens[0], TextLogprob(names(prompt.tokens[0])[0]))

    def add(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._append(entry.token, text_logprob(entry, self._names))

    def _append(self, token: int, logprob: TextLogprob) -> None:
        self.starts.append(len(self._text.text))
        self._text.add(token)
        self.logprobs.append(logprob)


class TextFormat(AnswerFormat):
    def __post_init__(self) -> None:
        super().__post_init__()
        echoed = self.generation.prompts if self.body.echo else ()
        self._prompts = [self.tokenizer.decode(one.tokens) if one.text is None else one.text for one in echoed]
        scored = () if self.generation.params.logprobs is None else echoed
        self._echoes = [EchoedPrompt(prompt, self.tokenizer, self.names) for prompt in scored]

    def take_scored(self, output: OutputBuffer, entries: Sequence[TokenLogprobs]) -> None:
        super().take_scored(output, entries)
        if self._echoes:
            self._echoed(output).add(entries)

    def written(self, entry: TokenLogprobs) -> TextLogprob:
        return text_logprob(entry, self.names)

    def _echoed(self, output: OutputBuffer) -> EchoedPrompt:
        return self._echoes[output.index // self.generation.params.n]

    def choice(self, output: OutputBuffer) -> Part:
        text = content_of(output.pieces)
        return {
            "index": output.index,
            "text": text if output.begun else self._echo(output) + text,
            "logprobs": self._logprobs(output),
            **self.finish(output),
            **self.prompt(output),
            **self.own(output),
        }

    def _echo(self, output: OutputBuffer) -> str:
        return self._prompts[output.index // self.generation.params.n] if self.body.echo else ""

    def _logprobs(self, output: OutputBuffer) -> Part | None:
        if self.generation.params.logprobs is None:
            return None
        start = len(self._echo(output))
        entries, offsets = output.logprobs, [start + offset for offset in output.offsets]
        if self._echoes and not output.begun:
            echoed = self._echoed(output)
            entries, offsets = [*echoed.logprobs, *entries], [*echoed.starts, *offsets]
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [entry.top for entry in entries],
            "text_offset": offsets,
        }


class ChatFormat(AnswerFormat):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._use = self.generation.reading.use
        self._calls: defaultdict[int, list[Part]] = defaultdict(list)  # that have begun, by output

    def whole(self) -> Part:
        return {**super().whole(), **self.prompt(self.outputs[0])}

    def choice(self, output: OutputBuffer) -> Part:
        return {"index": output.index, "message": self._message(output), **self._told(output)}

    def chunks(self, output: OutputBuffer) -> list[Part]:
        opening = [] if output.begun else [self._opening(output)]
        output.begun = True
        if opening and not (self.every_update or output.has_news):
            return opening
        nothing = {} if self._use.tools else {"content": ""}
        *before, last = [self._delta(output, piece) for piece in joined(output.pieces)] or [nothing]
        early = [self.event(output, self._silent(output, delta)) for delta in before]
        choice = {"index": output.index, "delta": last, **self._told(output)}
        return [*opening, *early, self.newest(output, choice)]

    def finish(self, output: OutputBuffer) -> Part:
        """As in OpenAI's API the reason is `stop` where the client named the function."""
        part = super().finish(output)
        if part["finish_reason"] == "stop" and self._calls[output.index] and self._use.named is None:
            part["finish_reason"] = "tool_calls"
        return part

    def _told(self, output: OutputBuffer) -> Part:
        return {"logprobs": self._logprobs(output), **self.finish(output), **self.own(output)}

    def _silent(self, output: OutputBuffer, delta: Part) -> Part:
        return {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _opening(self, output: OutputBuffer) -> Part:
        content = None if self._use.required else self.body.echoed
        seed = self.seed(output) if len(self.outputs) > 1 else {}
        event = self.event(output, {**self._silent(output, {"role": "assistant", "content": content}), **seed})
        prompt = self.prompt(output)
        if output.index:
            prompt.pop("prompt_token_ids", None)  # once is enough
        return {**event, **prompt}

    def _message(self, output: OutputBuffer) -> Part:
        calls, thoughts = self._calls[output.index], ""
        for piece in output.pieces:
            if isinstance(piece, CallBegin):
                calls.append(self._call(piece))
            elif isinstance(piece, Arguments):
                calls[piece.index]["function"]["arguments"] += piece.text
            elif isinstance(piece, Reasoning):
                thoughts += piece.text
        content = self.body.echoed + content_of(output.pieces)
        reasoning = {"reasoning": thoughts, "reasoning_content": thoughts} if thoughts else {}
        tool_calls = {"tool_calls": calls} if calls else {}
        empty = None if calls or thoughts else ""
        return {"role": "assistant", "content": content or empty, **reasoning, **tool_calls}

    def _delta(self, output: OutputBuffer, piece: Piece) -> Part:
        match piece:
            case Content():
                return {"content": piece.text}
            case Reasoning():
                return {"reasoning": piece.text, "reasoning_content": piece.text}
            case Arguments():
                return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        call = self._call(piece)
        self._calls[output.index].append(call)
        return {"tool_calls": [{"index": piece.index, **call}]}

    def _call(self, begin: CallBegin) -> Part:
        function = {"name": begin.name, "arguments": ""}
        return {"id": self.generation.reading.call_id(), "type": "function", "function": function}

    def written(self, entry: TokenLogprobs) -> Raw:
        return Raw(encode(chat_logprob(entry, self.names)))

    def _logprobs(self, output: OutputBuffer) -> Part | None:
        if self.generation.params.logprobs is None:
            return None
        return {"content": output.logprobs, "refusal": None}
