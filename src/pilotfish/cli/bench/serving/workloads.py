"""Where requests come from: generated workloads and mixes of them, prompt files, traces."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count
from math import ceil
from typing import Any

import numpy as np
from msgspec.structs import replace

from pilotfish.cli.bench.serving.generators import GENERATORS, GeneratedTask, SessionGenerator, WorkloadShape
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.requests import RequestSession, ServerRequest
from pilotfish.cli.bench.serving.texts import TextMaker
from pilotfish.errors import ParameterError, PromptError
from pilotfish.plan.trace import BLOCK_TOKENS, read_trace
from pilotfish.prompts import BadRow, Row, read_rows

#: Numbers that keep draws apart which have a seed in common.
_TEXT, _SHARED, _KIND, _BLOCK = range(4)
#: max_tokens of a prompt file's rows.
ANSWER = 128


@dataclass(frozen=True)
class WorkloadPart:
    name: str
    weight: float
    generate: SessionGenerator
    shape: WorkloadShape


def sessions_of(options: ServeBenchOptions, tokenizer: Any) -> Iterator[RequestSession]:
    """Of the workload, file or trace in options; only a trace ends. InputError names the first bad line."""
    if options.prompts is not None and options.trace is not None:
        raise ParameterError("trace", str(options.trace), "either --prompts or --trace")
    if options.trace is not None:
        found = replayed(options, tokenizer)
    elif options.prompts is not None:
        rows = [_of_row(row, options) for row in read_rows(options.prompts)]
        found = chain(rows, (_renamed(session, turn) for turn in count(1) for session in rows))
    else:
        found = generated(options, tokenizer)
    return (_as_asked(session, options) for session in found)


def generated(options: ServeBenchOptions, tokenizer: Any) -> Iterator[RequestSession]:
    """Without end. Of one seed the n-th session is always the same."""
    parts, seed = parts_of(options), options.seed
    weights = np.array([part.weight for part in parts])
    draw = np.random.default_rng((seed, _KIND))
    for number in count():
        part = parts[int(draw.choice(len(parts), p=weights / weights.sum()))]
        shared = TextMaker(tokenizer, (seed, _SHARED, zlib.crc32(part.name.encode())))
        asks = part.generate(TextMaker(tokenizer, (seed, _TEXT, number)), part.shape, shared)
        yield session_of(f"{part.name}-{number}", part.name, asks, part.shape.answer)


def parts_of(options: ServeBenchOptions) -> list[WorkloadPart]:
    """ParameterError unless --workload is a list of NAME or NAME:WEIGHT."""
    return [_part(text, options) for text in options.workload.split(",")]


def _part(text: str, options: ServeBenchOptions) -> WorkloadPart:
    name, _, weight = text.partition(":")
    try:
        share = float(weight or 1)
    except ValueError:
        share = 0.0
    if name not in GENERATORS or not 0 < share < float("inf"):
        raise ParameterError("workload", options.workload, f"NAME or NAME:WEIGHT of {', '.join(GENERATORS)}")
    generate, shape = GENERATORS[name]
    given = {"prompt": options.prompt_tokens, "answer": options.answer_tokens}
    if shape.turns > 1:
        given["turns"] = options.turns
    changes = {key: value for key, value in given.items() if value is not None}
    return WorkloadPart(name, share, generate, replace(shape, spread=options.spread, **changes))


def session_of(name: str, category: str, asks: Iterable[GeneratedTask], answer: int) -> RequestSession:
    turns = [
        ServerRequest(f"{name}.{turn}", category, answer, ask.messages, fields=ask.fields, session=name, turn=turn)
        for turn, ask in enumerate(asks)
    ]
    return RequestSession(turns)


def _of_row(row: Row | BadRow, options: ServeBenchOptions) -> RequestSession:
    if isinstance(row, BadRow):
        raise PromptError(f"{row.place}: {row.reason}")
    if not all(row.texts):
        raise PromptError(f"{row.place}: a text is empty")
    name, answer = str(row.id), options.answer_tokens or ANSWER
    if not row.chat:
        return RequestSession([ServerRequest(name, row.category, answer, prompt=row.texts[0], session=name)])
    asks = (GeneratedTask([{"role": "user", "content": text}]) for text in row.texts)
    return session_of(name, row.category, asks, answer)


def replayed(options: ServeBenchOptions, tokenizer: Any) -> Iterator[RequestSession]:
    """Of a trace in Mooncake's format a session for each line, at its time; blocks with equal hashes are equal texts.
    InputError names the first line that lacks a field."""
    assert options.trace is not None
    requests, scale = read_trace(options.trace), options.block_tokens / BLOCK_TOKENS

    @lru_cache(1 << 14)
    def block(hash_id: int) -> str:
        return TextMaker(tokenizer, (options.seed, _BLOCK, hash_id)).take(options.block_tokens)

    for number, request in enumerate(requests):
        whole = "".join(block(abs(hash_id)) for hash_id in request.hash_ids)
        characters = len(whole) * request.input_length / (BLOCK_TOKENS * len(request.hash_ids))
        answer = options.answer_tokens or max(1, ceil(scale * request.output_length))
        prompt = whole[: max(1, round(characters))]
        one = ServerRequest(f"trace-{number}", "trace", answer, prompt=prompt, session=f"trace-{number}")
        yield RequestSession([one], at=request.timestamp / 1000)


def _renamed(session: RequestSession, number: int) -> RequestSession:
    turns = [replace(one, id=f"{one.id}#{number}", session=f"{one.session}#{number}") for one in session.turns]
    return replace(session, turns=turns)


def _as_asked(session: RequestSession, options: ServeBenchOptions) -> RequestSession:
    """With the sampling that options say, and a seed of its own for each request."""
    extra = {"ignore_eos": True} if options.ignore_eos else {}
    turns = [
        replace(
            one,
            temperature=options.temperature,
            seed=zlib.crc32(f"{options.seed}/{one.id}".encode()),
            fields={**one.fields, **extra},
        )
        for one in session.turns
    ]
    return replace(session, turns=turns)


def take_sessions(found: Iterator[RequestSession], requests: int) -> list[RequestSession]:
    """The next sessions, until they have so many turns; fewer where there are no more."""
    taken, turns = [], 0
    while turns < requests and (session := next(found, None)) is not None:
        taken.append(session)
        turns += len(session.turns)
    return taken
