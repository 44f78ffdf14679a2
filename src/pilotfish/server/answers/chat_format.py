"""A chunk has one piece: content, reasoning, arguments of a call, or a call's beginning."""

from collections import defaultdict

from msgspec import Raw

from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning, content_of, joined
from pilotfish.server.answers.formats import AnswerFormat, OutputBuffer, Part
from pilotfish.server.answers.logprobs import chat_logprob
from pilotfish.server.http_errors import encode


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
