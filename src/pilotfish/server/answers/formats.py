from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from msgspec import Raw

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.engine.token_table import token_bytes
from pilotfish.grammar.parsers.pieces import ContentParser, OutputParser, Piece
from pilotfish.server.bodies.params import Generation, TokenizedPrompt, granted
from pilotfish.server.bodies.requests import SpeculationOptions, StreamOptions
from pilotfish.server.http_errors import HttpError, encode
from pilotfish.wire.serving import Delta, Finish, StepReport, Verified

LEAST = -9999.0  # stands for minus infinity, which JSON does not know
TokenNames = Callable[[int], tuple[str, list[int]]]  # a token's name in log-probabilities, and its bytes


def prompt_logprob(entry: TokenLogprobs, names: TokenNames) -> Raw:
    """Written as it comes: those of a long prompt are megabytes, and would hold up all streams."""
    ranked = [(token, p, rank) for rank, (token, p) in enumerate(entry.top, 1)]
    every = (*ranked, (entry.token, entry.logprob, entry.rank))
    part = {t: {"logprob": max(p, LEAST), "rank": rank, "decoded_token": names(t)[0]} for t, p, rank in every}
    return Raw(encode(part))


def chat_logprob(entry: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    def named(token: int, logprob: float) -> dict[str, Any]:
        text, data = names(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}

    return {**named(entry.token, entry.logprob), "top_logprobs": [named(*likely) for likely in entry.top]}


def token_text(tokenizer: Any) -> TokenNames:
    """As in OpenAI's API, bytes that are no text alone are written bytes:\\xe2\\x98."""
    bytes_of = token_bytes(tokenizer)

    @lru_cache(1 << 16)
    def name(token: int) -> tuple[str, list[int]]:
        data = bytes_of(token)
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    return name


Part = dict[str, Any]  # an object of a body, or some of its fields


@dataclass
class OutputBuffer:
    """`pieces`, `token_ids`, `logprobs` and `offsets` have not been sent to the client yet."""

    index: int
    prompt: TokenizedPrompt
    parser: OutputParser = field(default_factory=ContentParser)
    pieces: list[Piece] = field(default_factory=list)  # of the text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # as its format has written them
    offsets: list[int] = field(default_factory=list)  # characters of the whole output's text before each token
    begun: bool = False  # the client has been sent something
    tokens: int = 0
    end: int = 0  # characters of the whole output's text
    seed: int | None = None
    cached: dict[str, int] = field(default_factory=dict)  # tokens of the prompt whose KV was there, by tier
    finish: Finish | None = None  # once it has ended
    prompt_logprobs: list[Raw] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    handovers: list[HandOverReport] = field(default_factory=list)
    delta: Delta | None = None  # the newest
    steps: Sequence[StepReport] = ()  # behind it

    def add(self, delta: Delta, steps: Sequence[StepReport]) -> None:
        self.delta, self.steps = delta, steps
        self.read(delta)
        self.token_ids += delta.tokens
        if delta.ends:
            self.offsets += (self.end, *delta.ends[:-1])
            self.end = delta.ends[-1]
        self.tokens += len(delta.tokens)
        self.seed = delta.seed if self.seed is None else self.seed
        self.cached = self.cached or delta.cached
        self.finish = delta.finish
        self.verified += delta.verified
        self.handovers += delta.handovers

    def read(self, delta: Delta) -> None:
        self.pieces += self.parser.feed(delta.text)
        if delta.finish is not None:
            self.pieces += self.parser.finish()

    def clear(self) -> None:
        self.begun = True
        self.pieces.clear()
        self.token_ids.clear()
        self.logprobs.clear()
        self.offsets.clear()

    @property
    def started(self) -> bool:
        """False while the engine scores a prompt, part by part: the first event has all of it."""
        return self.tokens > 0 or self.finish is not None

    @property
    def has_news(self) -> bool:
        """False where tokens end within a character, or where a stop string or a call may begin."""
        return not self.begun or self.finish is not None or bool(self.logprobs) or bool(self.pieces)


@dataclass(eq=False)
class AnswerFormat:
    """A method for an optional field gives a part of a body, empty where the request did not ask for it."""

    generation: Generation
    tokenizer: Any
    token_text: TokenNames

    end_of_stream: ClassVar[bytes] = b"data: [DONE]\n\n"
    buffer: ClassVar[type[OutputBuffer]] = OutputBuffer

    def __post_init__(self) -> None:
        n, prompts, reading = self.generation.params.n, self.generation.prompts, self.generation.reading
        self.outputs = [self.buffer(i, prompts[i // n], reading.parser()) for i in range(len(prompts) * n)]
        self.body, self.head = self.generation.body, self.generation.head
        self.options = self.body.stream_options or StreamOptions()
        self.detailed = self.body.detail
        #: Whether an event is sent of each update, also of one that added neither text nor log-probabilities.
        self.every_update = self.detailed or self.options.continuous_usage_stats or self.body.return_token_ids
        self.names = self.token_text
        if self.body.return_tokens_as_token_ids:
            self.names = lambda token: (f"token_id:{token}", self.token_text(token)[1])

    def take(self, output: OutputBuffer, delta: Delta, steps: Sequence[StepReport]) -> None:
        output.add(delta, steps)
        output.logprobs += map(self.written, delta.logprobs)
        if delta.prompt_logprobs:
            self.take_scored(output, delta.prompt_logprobs)

    def take_scored(self, output: OutputBuffer, entries: Sequence[TokenLogprobs]) -> None:
        """Log-probabilities of a prompt. The engine scores it once, for its first output, which also begins first."""
        if self.body.prompt_logprobs is not None:
            output.prompt_logprobs += [prompt_logprob(entry, self.token_text) for entry in entries]

    def written(self, entry: TokenLogprobs) -> Any:
        return entry

    def whole(self) -> Part:
        choices = [self.choice(output) for output in self.outputs]
        return {**self.head, "choices": choices, **self.seed(self.outputs[0]), "usage": self.usage(), **self.metrics()}

    def choice(self, output: OutputBuffer) -> Part:
        raise NotImplementedError

    def chunks(self, output: OutputBuffer) -> list[Part]:
        return [self.newest(output, self.choice(output))]

    def newest(self, output: OutputBuffer, choice: Part) -> Part:
        ended = output.finish and all(each.finish for each in self.outputs)
        metrics = self.metrics() if ended and not self.options.include_usage else {}
        return {**self.event(output, choice), **metrics, **self.detail(output)}

    def closing(self) -> Part:
        return {**self.head, "choices": [], "usage": self.usage(), **self.metrics()}

    def failure(self, error: HttpError) -> list[Part]:
        return [error.body]

    def encoded(self, event: Part) -> bytes:
        return b"data: " + encode(event) + b"\n\n"

    def event(self, output: OutputBuffer, choice: Part) -> Part:
        """Usage is null if the closing event will have it, as in OpenAI's API."""
        seed = self.seed(output) if output.index == 0 else {}
        usage: Part = {"usage": None} if self.options.include_usage else {}
        if self.options.continuous_usage_stats:
            usage = {"usage": self.usage()}
        return {**self.head, "choices": [choice], **seed, **usage}

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
        n = self.generation.params.n
        found = [Counter(output.cached) for output in self.outputs]
        prompts = (found[first : first + n] for first in range(0, len(found), n))
        return sum((max(group, key=Counter.total) for group in prompts), Counter[str]())

    def metrics(self) -> Part:
        """Speculation is left out for several outputs, as in vLLM."""
        return {**self._speculation(), **({"pilotfish": answers} if (answers := self._answers()) else {})}

    def _answers(self) -> Part:
        """A cascade's small model never speculates. Limits are told where the request exceeded them."""
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
        reports = [report for output in self.outputs for report in output.handovers]
        if not reports:
            return {}
        every = {"handovers": [report.as_json() for report in reports]} if detailed else {}
        return {"handed_over": sum(report.tokens for report in reports), **every}

    def detail(self, output: OutputBuffer) -> Part:
        delta = output.delta
        if not self.detailed or delta is None:
            return {}
        said = {**self._answers(), "text": delta.text, "tokens": delta.tokens, "ends": delta.ends}
        handovers = [report.as_json() for report in delta.handovers]
        return {"pilotfish": {**said, "verified": delta.verified, "steps": output.steps, "handovers": handovers}}

    def seed(self, output: OutputBuffer) -> Part:
        if output.seed is None or output.begun:
            return {}
        return {"seed": str(output.seed) if isinstance(self.body.seed, str) else output.seed}

    def finish(self, output: OutputBuffer) -> Part:
        reason, stop = (None, None) if output.finish is None else (output.finish.reason, output.finish.stop)
        return {"finish_reason": reason, "stop_reason": stop}  # the stop string or token that ended it

    def own(self, output: OutputBuffer) -> Part:
        tokens = {"token_ids": output.token_ids} if self.body.return_token_ids else {}
        return {**tokens, **(self.seed(output) if len(self.outputs) > 1 else {})}

    def prompt(self, output: OutputBuffer) -> Part:
        part: Part = {}
        if self.body.prompt_logprobs is not None and not output.begun:
            n = self.generation.params.n
            part["prompt_logprobs"] = [None, *self.outputs[output.index // n * n].prompt_logprobs]
        if self.body.return_token_ids and not output.begun:
            part["prompt_token_ids"] = output.prompt.tokens
        return part


def speculative_decoding(steps: Sequence[Verified], spec_tokens: int, *, detailed: bool) -> Part:
    """In vLLM's shape: an acceptance length counts the target's own token too, drafts are nodes."""
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
