"""The bodies of answers, whole or as the chunks of a stream: what all have in common, and a completion's.
`chat_format` has a chat's, `openapi.json` describes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.server.answers.logprobs import EchoedPrompt, TextLogprob, TokenNames, prompt_logprob, text_logprob
from pilotfish.server.answers.stream import OutputBuffer
from pilotfish.server.bodies.params import Generation, granted
from pilotfish.server.bodies.requests import SpeculationOptions, StreamOptions
from pilotfish.server.http_errors import HttpError, encode
from pilotfish.wire.serving import Delta, StepReport, Verified

#: An object of a body, or some of its fields.
Part = dict[str, Any]


class AnswerFormat:
    """The body of an answer, whole or as the chunks of a stream. Subclasses make its choices. A method that gives what
    a request may ask for gives a part of a body, empty where it did not."""

    end_of_stream = b"data: [DONE]\n\n"
    buffer: ClassVar[type[OutputBuffer]] = OutputBuffer

    def __init__(self, generation: Generation, tokenizer: Any, token_text: TokenNames) -> None:
        self.generation, self.tokenizer, self.token_text = generation, tokenizer, token_text
        n, prompts = generation.params.n, generation.prompts
        parser = generation.reading.parser
        self.outputs = [self.buffer(i, prompts[i // n], parser()) for i in range(len(prompts) * n)]
        self.body, self.head = generation.body, generation.head
        self.options = self.body.stream_options or StreamOptions()
        self.detailed = self.body.detail
        #: Whether an event is sent of each update, also of one that added neither text nor log-probabilities.
        self.every_update = self.detailed or self.options.continuous_usage_stats or self.body.return_token_ids
        self.names: TokenNames = token_text
        if self.body.return_tokens_as_token_ids:
            self.names = lambda token: (f"token_id:{token}", token_text(token)[1])

    def take(self, output: OutputBuffer, delta: Delta, steps: Sequence[StepReport]) -> None:
        """What steps have added to an output."""
        output.add(delta, steps)
        output.logprobs += map(self.written, delta.logprobs)
        if delta.prompt_logprobs:
            self.take_scored(output, delta.prompt_logprobs)

    def take_scored(self, output: OutputBuffer, entries: Sequence[TokenLogprobs]) -> None:
        """Log-probabilities of an output's prompt. The engine scores it once, for the first of its outputs, which it
        also begins first."""
        if self.body.prompt_logprobs is not None:
            output.prompt_logprobs += [prompt_logprob(entry, self.token_text) for entry in entries]

    def written(self, entry: TokenLogprobs) -> Any:
        """Log-probabilities of an output as its choice has them."""
        return entry

    def whole(self) -> Part:
        """The answer, once all outputs have finished."""
        choices = [self.choice(output) for output in self.outputs]
        return {**self.head, "choices": choices, **self.seed(self.outputs[0]), "usage": self.usage(), **self.metrics()}

    def choice(self, output: OutputBuffer) -> Part:
        raise NotImplementedError

    def chunks(self, output: OutputBuffer) -> list[Part]:
        """Events of the newest update of an output."""
        return [self.newest(output, self.choice(output))]

    def newest(self, output: OutputBuffer, choice: Part) -> Part:
        """The event that tells of the newest update. Metrics come with the last one of the stream."""
        ended = output.finish and all(each.finish for each in self.outputs)
        metrics = self.metrics() if ended and not self.options.include_usage else {}
        return {**self.event(output, choice), **metrics, **self.detail(output)}

    def closing(self) -> Part:
        """The event after the last output's, with the usage."""
        return {**self.head, "choices": [], "usage": self.usage(), **self.metrics()}

    def failure(self, error: HttpError) -> list[Part]:
        """Events that say what broke the stream."""
        return [error.body]

    def encoded(self, event: Part) -> bytes:
        """As a server-sent event."""
        return b"data: " + encode(event) + b"\n\n"

    def event(self, output: OutputBuffer, choice: Part) -> Part:
        seed = self.seed(output) if output.index == 0 else {}
        return {**self.head, "choices": [choice], **seed, **self.event_usage()}

    def usage(self) -> Part:
        prompts = sum(len(prompt.tokens) for prompt in self.generation.prompts)
        completions = sum(output.tokens for output in self.outputs)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completions,
            "total_tokens": prompts + completions,
            "prompt_tokens_details": {"cached_tokens": self._cached().total()},
        }

    def _cached(self) -> Counter[str]:
        """Tokens of the prompts whose KV was there, by tier. Outputs of one prompt share what the first of them
        computes."""
        n = self.generation.params.n
        found = [Counter(output.cached) for output in self.outputs]
        prompts = (found[first : first + n] for first in range(0, len(found), n))
        return sum((max(group, key=Counter.total) for group in prompts), Counter[str]())

    def event_usage(self) -> Part:
        """Null if the closing event will have it, as in OpenAI's API."""
        if self.options.continuous_usage_stats:
            return {"usage": self.usage()}
        return {"usage": None} if self.options.include_usage else {}

    def metrics(self) -> Part:
        """Of several outputs no speculation, as in vLLM. Who answers, where the server has several variants or
        models."""
        return {**self._speculation(), **({"pilotfish": answers} if (answers := self._answers()) else {})}

    def _answers(self) -> Part:
        """The variant that speculates, and the model, where the server has several. A cascade's small model never
        speculates. What the request asked for more of than there is."""
        choice, cascade = self.generation.choice, self.generation.cascade
        named = choice.named and not (cascade is not None and cascade.side == "small")
        variant = {"variant": choice.variant.name} if named else {}
        cut = granted(self.body.speculation or SpeculationOptions(), self.generation.target)
        told = {**variant, **({"speculation": cut} if cut else {})}
        return told if cascade is None else {**told, **vars(cascade)}

    def _speculation(self) -> Part:
        level = self.generation.metrics
        if level == "none":
            return {}
        elsewhere = {"cached_by_tier": dict(self._cached()), **self._handed_over(detailed=level == "detailed")}
        steps = [step for step in self.outputs[0].verified if step.nodes] if len(self.outputs) == 1 else []
        if not steps:
            return {"metrics": {"speculative_decoding": None, **elsewhere}}
        origins = Counter(origin for step in steps for origin in step.origins)
        decoding = speculative_decoding(steps, self.generation.target.max_nodes, detailed=level == "detailed")
        by_origin = {"accepted_by_origin": dict(origins)} if origins else {}
        return {"metrics": {"speculative_decoding": decoding, **by_origin, **elsewhere}}

    def _handed_over(self, *, detailed: bool) -> Part:
        """Tokens whose KV prefill workers computed; every hand-over where all is to be told."""
        reports = [report for output in self.outputs for report in output.handovers]
        if not reports:
            return {}
        every = {"handovers": [report.as_json() for report in reports]} if detailed else {}
        return {"handed_over": sum(report.tokens for report in reports), **every}

    def detail(self, output: OutputBuffer) -> Part:
        """The steps behind an event."""
        delta = output.delta
        if not self.detailed or delta is None:
            return {}
        said = {**self._answers(), "text": delta.text, "tokens": delta.tokens, "ends": delta.ends}
        handovers = [report.as_json() for report in delta.handovers]
        return {"pilotfish": {**said, "verified": delta.verified, "steps": output.steps, "handovers": handovers}}

    def seed(self, output: OutputBuffer) -> Part:
        """Text if the request's was."""
        if output.seed is None or output.begun:
            return {}
        return {"seed": str(output.seed) if isinstance(self.body.seed, str) else output.seed}

    def finish(self, output: OutputBuffer) -> Part:
        reason, stop = (None, None) if output.finish is None else (output.finish.reason, output.finish.stop)
        return {"finish_reason": reason, "stop_reason": stop}  # the stop string or token that ended it

    def own(self, output: OutputBuffer) -> Part:
        """The last fields of a choice: its tokens, and the seed of each output where there are several."""
        tokens = {"token_ids": output.token_ids} if self.body.return_token_ids else {}
        return {**tokens, **(self.seed(output) if len(self.outputs) > 1 else {})}

    def prompt(self, output: OutputBuffer) -> Part:
        """Log-probabilities and tokens of the output's prompt. The first token has no log-probability."""
        part: Part = {}
        if self.body.prompt_logprobs is not None and not output.begun:
            n = self.generation.params.n
            part["prompt_logprobs"] = [None, *self.outputs[output.index // n * n].prompt_logprobs]
        if self.body.return_token_ids and not output.begun:
            part["prompt_token_ids"] = output.prompt.tokens
        return part


class TextFormat(AnswerFormat):
    """/v1/completions: an answer and a chunk have one shape."""

    def __init__(self, generation: Generation, tokenizer: Any, token_text: TokenNames) -> None:
        super().__init__(generation, tokenizer, token_text)
        scores = self.body.echo and generation.params.logprobs is not None
        prompts = generation.prompts if scores else ()
        self._echoes = [EchoedPrompt(prompt, tokenizer, self.names) for prompt in prompts]
        echoed = generation.prompts if self.body.echo else ()
        self._prompts = [tokenizer.decode(one.tokens) if one.text is None else one.text for one in echoed]

    def take_scored(self, output: OutputBuffer, entries: Sequence[TokenLogprobs]) -> None:
        super().take_scored(output, entries)
        if self._echoes:
            self._echoed(output).add(entries)

    def written(self, entry: TokenLogprobs) -> TextLogprob:
        return text_logprob(entry, self.names)

    def _echoed(self, output: OutputBuffer) -> EchoedPrompt:
        return self._echoes[output.index // self.generation.params.n]

    def choice(self, output: OutputBuffer) -> Part:
        text = output.content
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
        """Of each token, which begins at its offset in the text."""
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


def named_event(event: Part) -> bytes:
    """As a server-sent event that has the name of its type."""
    return f"event: {event['type']}\ndata: ".encode() + encode(event) + b"\n\n"


def speculative_decoding(steps: Sequence[Verified], spec_tokens: int, *, detailed: bool) -> Part:
    """Summary of at least one step, in vLLM's shape: an acceptance length counts the target's own token too, drafts are
    nodes, histograms count steps by their accepted nodes. `spec_tokens` is the most nodes of a step."""
    accepted, drafted = [step.accepted for step in steps], [step.nodes for step in steps]
    by_length: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for step in steps:
        by_length[step.nodes][step.accepted] += 1
    summary = {
        "mean_acceptance_length": 1 + sum(accepted) / len(steps),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": dict(sorted(Counter(accepted).items())),
        "acceptance_histogram_by_draft_length": {n: dict(sorted(by_length[n].items())) for n in sorted(by_length)},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": spec_tokens,
    }
    return {**summary, **({"per_step_accepted": accepted, "per_step_drafted": drafted} if detailed else {})}
