"""A server under load: streams of many kinds at a time, some of which break off, against the same requests alone; and
under open streams a target that stands still."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import uvloop
from json_schemas import object_of
from programs import Program, memory_bytes, start_server
from prometheus_client.parser import text_string_to_metric_families

from pilotfish.cli.bench.report import MEBIBYTE, Row
from pilotfish.cli.bench.serving.client import CHATS, COMPLETIONS, Answer, Exchange, exchange
from pilotfish.cli.bench.workload import Prompt
from pilotfish.config.engine import EngineConfig
from pilotfish.errors import EngineError, ParameterError
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.metadata import load_tokenizer

#: Tokens of a long prompt, from the shortest to the longest; the context may allow fewer.
LONG = (2000, 6000)
#: Special fields of the requests of a kind.
KINDS: dict[str, dict[str, Any]] = {
    "completion": {"temperature": 0.8},
    "chat": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "long prompt": {"temperature": 0.8},
    "whole completion": {"temperature": 0.8, "stream": False},
    "whole chat": {"temperature": 0.8, "stream": False},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "chat logprobs": {"temperature": 0.8, "logprobs": True, "top_logprobs": 2},
    "n=2": {"temperature": 1.0, "n": 2},
    "chat n=3": {"temperature": 1.0, "n": 3},
    "stop": {"temperature": 0.8, "stop": ["\n\n", "return"]},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "top_p": 0.9},
}
#: What outputs must be, so that most are whole within 96 tokens.
SCHEMA = object_of(
    *("name", "kind", "sizes", "at"),
    name={"type": "string", "maxLength": 12},
    kind={"enum": ["function", "class", "größer"]},
    sizes={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    at={"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"},
)
PATTERN = r"[a-z_]{3,12}\([a-z]{1,6}(, [a-z]{1,6}){0,3}\)"
SUMS = 'start: NUM (("+" | "-") NUM){1,8}\nNUM: /[1-9][0-9]{0,3}/'
TOOL = {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}
_JSON = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
KINDS |= {
    "chat json": {"temperature": 0.8, "response_format": _JSON},
    "whole chat json": {"temperature": 0.0, "response_format": _JSON, "stream": False},
    "regex": {"temperature": 1.0, "structured_outputs": {"regex": PATTERN}},
    "grammar": {"temperature": 0.8, "structured_outputs": {"grammar": SUMS}},
    "chat tool": {"temperature": 0.8, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "whole chat tool": {"temperature": 0.8, "tools": [TOOL], "tool_choice": "required", "stream": False, "n": 2},
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
#: Tokens that may wait: no request of the mix is turned away.
QUEUE = ("--max-queued-requests=4096", f"--max-queued-tokens={1 << 24}")
#: A process's memory is flat if, in the second half, it grows by less than this share or by less than these bytes.
FLAT_SHARE, FLAT_BYTES = 0.01, 2 << 20
#: Seconds after the last answer in which all that was held must have been given back: statuses come once a second.
SETTLE = 10.0
#: What must be zero then.
HELD = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "pilotfish_requests_in_flight",
)
RESTARTS = "pilotfish_target_restarts_total"
REPLICAS_READY, RESUMED = "pilotfish_replica_ready", "pilotfish_resumed_requests_total"
#: Seconds from the first requests until the target is stopped.
WARM = 0.3


# -- the client


class CutExchange(Exchange):
    """Breaks the connection off once `cut` bytes of the answer have come."""

    def __init__(self, request: bytes, cut: int | None) -> None:
        super().__init__(request)
        self._cut = cut

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._cut is not None and self.size >= self._cut:
            self.transport.abort()

    @property
    def size(self) -> int:
        """Bytes so far, headers included."""
        return sum(len(data) for _, data in self.parts)


async def ask(url: str, path: str, body: dict[str, Any], cut: int | None = None) -> tuple[Answer, int]:
    """An answer, which is broken off once `cut` bytes have come, and how many came."""
    spoken = await exchange(url, path, body, lambda request: CutExchange(request, cut))
    assert isinstance(spoken, CutExchange)
    return Answer(spoken.parts, spoken.sent, spoken.closed), spoken.size


async def post(url: str, path: str, body: dict[str, Any], cut: int | None = None) -> Answer:
    answer, _ = await ask(url, path, body, cut)
    return answer


def metrics_of(url: str, key: Callable[[Any], str] = lambda sample: str(sample.name)) -> dict[str, float]:
    """Each metric of a server, summed over its labels; or by another `key` of a sample, where that is not empty."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found: Counter[str] = Counter()
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        found[key(sample)] += sample.value  # type: ignore[assignment]
    return {name: value for name, value in found.items() if name}


# -- requests and their answers


@dataclass(frozen=True)
class Asked:
    """A request: its seed is fixed, so its answer is."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])


@dataclass
class Output:
    """Output of an answer, its chunks joined."""

    text: str = ""
    finish: tuple[Any, Any] = (None, None)  # finish_reason, stop_reason
    logprobs: list[Any] = field(default_factory=list)  # one entry a token
    calls: dict[int, str] = field(default_factory=dict)  # arguments of tool calls

    def begins(self, other: Output) -> bool:
        """Whether `other` starts with this output, which was cut off."""
        cut = other.logprobs[: len(self.logprobs)] == self.logprobs and other.text.startswith(self.text)
        cut = cut and all(other.calls.get(index, "").startswith(text) for index, text in self.calls.items())
        return cut and self.finish in ((None, None), other.finish)


@dataclass(frozen=True)
class Known:
    """A request, its answer when it is alone, and how many bytes that is."""

    asked: Asked
    expected: dict[int, Output]
    size: int


def mixed(prompts: Sequence[Prompt], tokenizer: Any, context: int, number: int, max_tokens: int) -> list[Asked]:
    """`number` distinct requests, of all kinds in turn; chats only where the model has a template."""
    kinds = [kind for kind in KINDS if tokenizer.chat_template is not None or "chat" not in kind]
    draw, requests = random.Random(0), list[Asked]()
    for index in range(number):
        kind = kinds[index % len(kinds)]
        text: str | list[int] = prompts[index % len(prompts)].text
        if kind == "long prompt":
            tokens = min(draw.randint(*LONG), context - max_tokens)
            text = joined_prompts(prompts, tokenizer, tokens, first=index)
        length = draw.randint(max_tokens // 2 or 1, max_tokens)
        body = {"max_tokens": length, "seed": 1000 + index, **STREAMED, **KINDS[kind]}
        if not body["stream"]:
            del body["stream_options"]
        if "chat" in kind:
            requests.append(Asked(kind, CHATS, {**body, "messages": [{"role": "user", "content": text}]}))
        else:
            requests.append(Asked(kind, COMPLETIONS, {**body, "prompt": text}))
    return requests


def joined_prompts(prompts: Sequence[Prompt], tokenizer: Any, tokens: int, first: int) -> list[int]:
    """A prompt of so many tokens: whole prompts from the `first` on, the last one cut."""
    found: list[int] = []
    for turn in range(tokens):
        found += tokenizer.encode(prompts[(first + turn) % len(prompts)].text)
        if len(found) >= tokens:
            return found[:tokens]
    raise ParameterError("prompts", len(prompts), f"prompts that fill {tokens} tokens")


def outputs(answer: Answer) -> dict[int, Output]:
    """Outputs of an answer by index."""
    found: defaultdict[int, Output] = defaultdict(Output)
    for choice in (choice for event in answer.events for choice in event.data.get("choices", ())):
        output = found[choice["index"]]
        said = choice.get("delta") or choice.get("message")
        for call in (said or {}).get("tool_calls") or ():
            index = call.get("index", len(output.calls))  # a whole answer lists them
            output.calls[index] = output.calls.get(index, "") + (call["function"].get("arguments") or "")
        output.text += (said.get("content") or "") if said is not None else choice.get("text", "")
        output.logprobs += _entries(choice.get("logprobs"))
        if choice.get("finish_reason") is not None:
            output.finish = (choice["finish_reason"], choice.get("stop_reason"))
    return dict(found)


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    return [list(row) for row in zip(*columns, strict=True)]


def agrees(answer: Answer, expected: dict[int, Output]) -> bool:
    """Whether an answer is the expected one or, where it was cut off, a beginning of it."""
    found = outputs(answer)
    if answer.ended:
        return found == expected
    return all(index in expected and output.begins(expected[index]) for index, output in found.items())


async def alone(url: str, asked: Sequence[Asked]) -> list[Known]:
    """Runs each request while no other runs."""
    known = []
    for one in asked:
        answer, size = await ask(url, one.path, one.body)
        if answer.status != 200 or not answer.ended:
            raise EngineError(f"server: {one.kind}: status {answer.status}: {answer.events[-1:]}")
        known.append(Known(one, outputs(answer), size))
    return known


# -- load


@dataclass
class Tally:
    """Counts of the answers so far."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    unequal: Counter[str] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)  # answers of each client
    aborted: int = 0
    failed: int = 0  # answers that ended without being broken off, and not well

    def add(self, known: Known, answer: Answer, *, cut: bool) -> None:
        kind = known.asked.kind
        self.statuses[str(answer.status or "none")] += 1
        self.kinds[kind] += 1
        self.aborted += cut and not answer.ended
        self.failed += not cut and not answer.ended
        if answer.status == 200 and not agrees(answer, known.expected):
            self.unequal[kind] += 1

    @property
    def broken(self) -> int:
        return self.unequal.total() + self.failed + self.statuses.total() - self.statuses["200"]


@dataclass(frozen=True)
class Load:
    """Clients and their requests."""

    prompts: Sequence[Prompt]
    seconds: float = 300.0
    streams: int = 64
    requests: int = 96  # distinct ones, each run alone first
    aborts: float = 0.15  # share of streams that clients break off
    max_tokens: int = 96


#: What runs in a thread beside the clients until a time, and gives further figures.
Beside = Callable[[Program, Tally, float], Row]


def run_load(config: EngineConfig, load: Load, beside: Beside, options: Sequence[str] = ()) -> Row:
    """Figures of a server under load."""
    tokenizer, context = load_tokenizer(config.target), load_config(config.target).max_position_embeddings
    asked = mixed(load.prompts, tokenizer, context, load.requests, load.max_tokens)
    with (
        start_server(config, [*QUEUE, *options]) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        url, tally = server.told["url"], Tally()
        known = runner.run(alone(url, asked))
        figures = runner.run(_loaded(server, load, known, tally, beside))
        held, told = settled(partial(metrics_of, url)), metrics_of(url)
    return {
        "kinds": dict(tally.kinds),
        "statuses": dict(tally.statuses),
        "unequal": dict(tally.unequal),
        "aborted": tally.aborted,
        "failed": tally.failed,
        "broken": tally.broken,
        "resumed": int(told[RESUMED]),
        "held": held,  # afterwards
        **figures,
    }


async def _loaded(server: Program, load: Load, known: Sequence[Known], tally: Tally, beside: Beside) -> Row:
    until, url = time.monotonic() + load.seconds, server.told["url"]
    running = asyncio.create_task(asyncio.to_thread(beside, server, tally, until))
    await asyncio.gather(*(client(url, load.aborts, known, tally, until, seed) for seed in range(load.streams)))
    return await running


async def client(
    url: str, aborts: float, known: Sequence[Known], tally: Tally, until: float, seed: int, salted: float = 0.0
) -> None:
    """Sends requests one after another, in an order of its own, until the time is over; a share of them, `salted`, for
    a tenant whose KV nobody has."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        one = draw.choice(known)
        salt = {"cache_salt": f"{seed} {draw.random()}"} if draw.random() < salted else {}
        cut = draw.randrange(1, one.size) if one.asked.stream and draw.random() < aborts else None
        answer = await post(url, one.asked.path, {**one.asked.body, **salt}, cut)
        tally.add(one, answer, cut=cut is not None)
        tally.ended[seed] += 1


def settled(metrics: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Metrics of HELD once all are zero, or at the latest after SETTLE seconds."""
    for _ in range(round(SETTLE / 0.25)):
        found = metrics()
        held = {name: found[name] for name in HELD}
        if not any(held.values()):
            break
        time.sleep(0.25)
    return held


# -- beside the clients


def memory(server: Program, tally: Tally, until: float) -> Row:  # noqa: ARG001
    """Figures of each process's resident bytes, which are taken once a second."""
    processes = server.processes()
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in processes}
    while time.monotonic() < until:
        for name, pid in processes.items():
            samples[name].append((time.monotonic(), memory_bytes(pid)))
        time.sleep(1.0)
    return {"memory": [{"process": name, **memory_of(one)} for name, one in samples.items()]}


def memory_of(samples: Sequence[tuple[float, int]]) -> Row:
    """A process's resident memory by seconds and bytes in their order, and the line through the second half."""
    sizes = [size for _, size in samples]
    late = np.array(samples[len(samples) // 2 :], dtype=float)
    seconds = float(late[-1, 0] - late[0, 0])
    slope = float(np.polyfit(late[:, 0] - late[0, 0], late[:, 1], 1)[0]) if seconds > 0 else 0.0
    return {
        "first_mib": sizes[0] / MEBIBYTE,
        "last_mib": sizes[-1] / MEBIBYTE,
        "mib_per_minute": 60 * slope / MEBIBYTE,
        "flat": slope * seconds < max(FLAT_SHARE * float(late[:, 1].mean()), FLAT_BYTES),
    }


def kills(replicas: int, pause: float) -> Beside:
    """Kills one target after the other, `pause` seconds after all were ready and every client had an answer since: a
    request that loses three targets fails, however slow the machine."""

    def run(server: Program, tally: Tally, until: float) -> Row:
        killed, before = 0, Counter[int]()
        while time.monotonic() < until:
            told = metrics_of(server.told["url"])
            answered = all(count > before[client] for client, count in tally.ended.copy().items())
            if told[RESTARTS] == killed and told[REPLICAS_READY] == replicas and answered:
                time.sleep(pause)
                before = tally.ended.copy()
                os.kill(server.processes()[f"target {killed % replicas}"], signal.SIGKILL)
                killed += 1
            time.sleep(0.1)
        return {"kills": killed}

    return run


# -- a target that stands still


def run_standstill(
    config: EngineConfig, prompts: Sequence[Prompt], stops: Sequence[float], streams: int, max_tokens: int
) -> list[Row]:
    """Stop the target for each of `stops` seconds in turn, under open streams, and let it go on."""
    asked = [_endless(prompts[i % len(prompts)], i, max_tokens) for i in range(streams)]
    with (
        start_server(config, [*QUEUE, "--target-timeout=30"]) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        known = runner.run(alone(server.told["url"], asked))
        return [runner.run(_stopped(server, known, seconds)) for seconds in stops]


def _endless(prompt: Prompt, number: int, max_tokens: int) -> Asked:
    """A stream that ignores the end of sequence."""
    body = {"prompt": prompt.text, "max_tokens": max_tokens, "temperature": 0.8, "seed": number}
    return Asked("completion", COMPLETIONS, {**body, "ignore_eos": True, **STREAMED})


async def _stopped(server: Program, known: Sequence[Known], seconds: float) -> Row:
    """Stops the target once. Counts outputs unlike those of the same request alone, and streams that ended too early;
    `told_after` is in seconds until /ready was no longer 200, None where it always was."""
    url, pid = server.told["url"], server.processes()["target"]
    before = metrics_of(url)[RESTARTS]
    answers = [asyncio.create_task(post(url, one.asked.path, one.asked.body)) for one in known]
    await asyncio.sleep(WARM)
    if all(answer.done() for answer in answers):
        raise EngineError("max_tokens: all streams had ended before the target was stopped; more are needed")
    os.kill(pid, signal.SIGSTOP)
    try:
        told = await asyncio.to_thread(_unready_after, url, seconds)
    finally:
        with suppress(ProcessLookupError):  # it was killed after the limit
            os.kill(pid, signal.SIGCONT)
    done = [await answer for answer in answers]
    while not await asyncio.to_thread(_is_ready, url):
        await asyncio.sleep(0.1)
    return {
        "seconds": seconds,
        "streams": len(known),
        "unequal": sum(not agrees(answer, one.expected) for answer, one in zip(done, known, strict=True)),
        "broken": sum(answer.status != 200 or not answer.ended or "error" in answer.events[-1].data for answer in done),
        "told_after": told,
        "restarts": int(metrics_of(url)[RESTARTS] - before),
    }


def _unready_after(url: str, seconds: float) -> float | None:
    """Seconds until /ready is no longer 200; None if it always is for so long."""
    began, told = time.perf_counter(), None
    while (passed := time.perf_counter() - began) < seconds:
        if told is None and not _is_ready(url):
            told = passed
        time.sleep(0.05)
    return told


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=30) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False
