from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Raw, Struct

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.engine.sample import TextStream
from pilotfish.grammar.parsers.pieces import content_of
from pilotfish.server.answers.formats import AnswerFormat, OutputBuffer, Part
from pilotfish.server.answers.logprobs import LEAST, TokenNames
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
