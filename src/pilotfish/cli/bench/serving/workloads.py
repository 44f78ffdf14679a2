"""Where requests come from: generated workloads and mixes of them, prompt files, traces."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count
from math import ceil
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.requests import Message, RequestSession, ServerRequest
from pilotfish.cli.bench.serving.texts import Kind, TextMaker
from pilotfish.config.hardware.tables import read_table
from pilotfish.errors import ParameterError, PromptError
from pilotfish.plan.trace import BLOCK_TOKENS, read_trace
from pilotfish.prompts import BadRow, Row, read_rows

#: Numbers that keep draws apart which have a seed in common.
_TEXT, _SHARED, _KIND, _BLOCK = range(4)
#: max_tokens of a prompt file's rows.
ANSWER = 128


class WorkloadShape(Struct, frozen=True):
    """As workloads.toml has it."""

    prompt: int
    answer: int  # max_tokens
    turns: int = 1
    message: int = 0  # each turn after the first: a question, or what a tool has returned
    spread: float = 0.0  # lengths vary by up to this share
    kind: Kind = "sentences"
    words: str = ""


SHAPES = read_table(__file__, "workloads", dict[str, WorkloadShape])


@dataclass(frozen=True)
class WorkloadPart:
    name: str
    weight: float
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
        generate = GENERATORS.get(part.name, asking)
        asks = generate(TextMaker(tokenizer, (seed, _TEXT, number)), part.shape, shared)
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
    if name not in SHAPES or not 0 < share < float("inf"):
        raise ParameterError("workload", options.workload, f"NAME or NAME:WEIGHT of {', '.join(SHAPES)}")
    shape = SHAPES[name]
    given = {"prompt": options.prompt_tokens, "answer": options.answer_tokens}
    if shape.turns > 1:
        given["turns"] = options.turns
    changes = {key: value for key, value in given.items() if value is not None}
    return WorkloadPart(name, share, replace(shape, spread=options.spread, **changes))


def session_of(name: str, category: str, asks: Iterable[ServerRequest], answer: int) -> RequestSession:
    turns = [
        replace(ask, id=f"{name}.{turn}", category=category, max_tokens=answer, session=name, turn=turn)
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
        return _single(name, row.category, row.texts[0], answer)
    return session_of(name, row.category, [ServerRequest([_user(text)]) for text in row.texts], answer)


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
        yield _single(f"trace-{number}", "trace", prompt, answer, request.timestamp / 1000)


def _single(name: str, category: str, text: str, answer: int, at: float = 0.0) -> RequestSession:
    one = ServerRequest([_user(text)], id=name, category=category, max_tokens=answer, session=name)
    return RequestSession([one], at)


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


# -- what generated sessions ask, turn by turn


#: Makes the turns of a session, out of a text maker of its own and one that all sessions of the workload share.
SessionGenerator = Callable[[TextMaker, WorkloadShape, TextMaker], list[ServerRequest]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def asking(text: TextMaker, shape: WorkloadShape, _: TextMaker) -> list[ServerRequest]:
    taken = text.take(text.length(shape.prompt, shape.spread), shape.kind)
    return [ServerRequest([_user(shape.words.format(text=taken, question=text.one("questions")))])]


def sessions(text: TextMaker, shape: WorkloadShape, _: TextMaker) -> list[ServerRequest]:
    lengths = [shape.prompt, *[shape.message] * (shape.turns - 1)]
    return [ServerRequest([_user(text.take(text.length(mean, shape.spread), "questions"))]) for mean in lengths]


def structured(text: TextMaker, shape: WorkloadShape, _: TextMaker) -> list[ServerRequest]:
    name = text.choice(list(SCHEMAS))
    report = text.take(text.length(shape.prompt, shape.spread))
    asked = f"Write down the {name} of this report as JSON.\n\n{report}"
    return [ServerRequest([_user(asked)], _reply(name, SCHEMAS[name]))]


def agents(text: TextMaker, shape: WorkloadShape, shared: TextMaker) -> list[ServerRequest]:
    """A task in steps. All tasks share a system prompt with the tools' schemas; replies are an action in JSON, and what
    the tool has returned is the user's next turn."""
    tools = "\n".join(json.dumps({"name": name, "parameters": schema}) for name, schema in ARGUMENTS.items())
    rules, fields = shared.take(shape.prompt), _reply("action", ACTION)
    system = {"role": "system", "content": f"You are an agent. Reply with one action.\n{tools}\n{rules}"}
    results = [text.take(text.length(shape.message, shape.spread)) for _ in range(shape.turns - 1)]
    first = ServerRequest([system, _user(f"Task: {text.one('tasks')}")], fields)
    return [first, *(ServerRequest([_user(result)], fields) for result in results)]


def _reply(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}


def _object(kinds: Mapping[str, str]) -> Mapping[str, Any]:
    """A JSON schema, by the kind of each property."""
    properties = {name: _TABLES["kinds"][kind] for name, kind in kinds.items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TABLES = read_table(__file__, "schemas", dict[str, dict[str, Any]])
SCHEMAS, ARGUMENTS = ({name: _object(own) for name, own in _TABLES[of].items()} for of in ("schemas", "arguments"))
ACTION = _object(_TABLES["action"])

#: Of workloads that do more than ask for one thing.
GENERATORS: dict[str, SessionGenerator] = {"sessions": sessions, "agents": agents, "json": structured}
