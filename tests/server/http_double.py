"""An engine that runs a script, and a client that speaks ASGI, message by message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import msgspec

from pilotfish.config.server import ServerConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.engine.token_table import TextStream
from pilotfish.server.application import make_app
from pilotfish.server.auth import Keyring, load_keyring
from pilotfish.server.limits import Admission, RequestGuard
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.wire.serving import Delta, EngineRequest, Finish, Identity, StepReport, Verified

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
IDENTITY = Identity("tiny", "sync", "float32", 256, 512, 4096, 256, 8, 8)
STEP = StepReport(1.0, 0.001, 0.002, 0.003, 0.004, 1, 3, 2, 1, 2, 0, 1.006)


@dataclass(frozen=True)
class Update:
    delta: Delta
    steps: tuple[StepReport, ...] = (STEP,)
    index: int = 0


@dataclass(frozen=True)
class Health:
    ready: bool = True
    reason: str = ""
    retry_after: float = 1.0
    restarts: int = 0
    identity: Identity | None = IDENTITY
    replicas: tuple[Any, ...] = ()


@dataclass
class Submitted:
    tokens: list[int]
    params: SamplingParams
    cache_salt: str | None
    max_nodes: int | None
    session: str | None
    draft: str = ""
    aborted: bool = False


#: What a stream gives: updates, then maybe an error. An Event is waited for.
Script = Callable[[Submitted], Iterable[Update | Exception | asyncio.Event]]


class ScriptedStream:
    """The scripts of all prompts, taking turns."""

    def __init__(self, submitted: list[Submitted], script: Script) -> None:
        self._submitted = submitted
        self._updates = self._run([iter(script(each)) for each in submitted])

    async def _run(self, scripts: list[Iterator[Update | Exception | asyncio.Event]]) -> AsyncIterator[Update]:
        for turn in zip_longest(*scripts):
            for i, item in enumerate(turn):
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif item is not None:
                    yield replace(item, index=i * self._submitted[i].params.n + item.delta.index)

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> Update:
        return await anext(self._updates)

    def abort(self) -> None:
        for submitted in self._submitted:
            submitted.aborted = True

    def revise(self, max_nodes: int | None) -> None:
        for submitted in self._submitted:
            submitted.max_nodes = max_nodes


@dataclass
class Engine:
    tokenizer: Any
    script: Script
    defaults: dict[str, Any] = field(default_factory=dict)
    health: Health = Health()
    submitted: list[Submitted] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """The text of the last one."""
        return str(self.tokenizer.decode(self.submitted[-1].tokens))

    def says(self, *texts: str, at_a_time: int = 3, reason: Any = "stop") -> None:
        self.script = saying(self.tokenizer, *texts, at_a_time=at_a_time, finish=Finish(reason, None))

    def submit(self, requests: Sequence[EngineRequest]) -> ScriptedStream:
        new = [Submitted(**msgspec.structs.asdict(request)) for request in requests]
        self.submitted += new
        return ScriptedStream(new, self.script)


def saying(tokenizer: Any, *texts: str, finish: Finish | None = None, at_a_time: int = 2) -> Script:
    """Each output i of a request says text i (the last one again, where there are more), some tokens at a time, of
    which each but the last was drafted."""
    end = finish or Finish("stop", None)

    def script(submitted: Submitted) -> list[Update]:
        said = [texts[min(i, len(texts) - 1)] for i in range(submitted.params.n)]
        each = [list(deltas(tokenizer, i, text, submitted, end, at_a_time)) for i, text in enumerate(said)]
        return [Update(delta) for step in zip_longest(*each) for delta in step if delta is not None]

    return script


def deltas(tokenizer: Any, index: int, text: str, submitted: Submitted, end: Finish, at_a_time: int) -> Iterable[Delta]:
    tokens, params = tokenizer.encode(text, add_special_tokens=False), submitted.params
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=params.skip_special_tokens))
    for start in range(0, len(tokens), at_a_time):
        part = tokens[start : start + at_a_time]
        ends = []
        for token in part:
            stream.add(token)
            ends.append(len(stream.text))
        last = start + at_a_time >= len(tokens)
        if last:
            stream.finish()
        verified = [Verified(1.0, len(part), 3, len(part) - 1, ["lm"] * (len(part) - 1))]
        delta = Delta(index + 1, index, part, stream.take(), ends, verified)
        if params.logprobs is not None:
            delta = msgspec.structs.replace(delta, logprobs=[logprob(token, params.logprobs) for token in part])
        if params.prompt_logprobs is not None and start == 0 and index == 0:
            scored = [logprob(token, params.prompt_logprobs) for token in submitted.tokens[1:]]
            delta = msgspec.structs.replace(delta, prompt_logprobs=scored)
        seed = 100 + index if params.seed is None else params.seed + index
        yield msgspec.structs.replace(delta, seed=seed if start == 0 else None, finish=end if last else None)


def logprob(token: int, n: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.5, 2, tuple((candidate, -1.0 - candidate) for candidate in range(40, 40 + n)))


def application(engine: Engine, guard: Any = None, **config: Any) -> Any:
    """A server over `engine`, open to everybody where there is no `guard`."""
    guard = guard or RequestGuard(Keyring([]), Admission(ServerConfig()), unread_metrics())
    return make_app(engine, ServerConfig(**config), guard, None)  # type: ignore[arg-type]


@cache
def unread_metrics() -> ServerMetrics:
    return ServerMetrics("tiny")


def counted(metrics: ServerMetrics, prefix: str) -> dict[str, float]:
    """Samples whose names begin so, by their names and labels, without the model's."""
    lines = [line for line in metrics.render()[0].decode().splitlines() if line.startswith(prefix)]
    pairs = [line.rsplit(" ", 1) for line in lines if "_created" not in line]
    return {name.replace(',model_name="tiny"', "").replace('model_name="tiny",', ""): float(x) for name, x in pairs}


# -- the client


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each event; DONE, which must be the last one, is left out."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@dataclass(frozen=True)
class Client:
    """Of one application. Each call runs in a loop of its own."""

    app: Any

    def get(self, path: str, **headers: str) -> Answer:
        return asyncio.run(exchange(self.app, "GET", path, b"", headers))

    def post(self, path: str, body: Any = None, raw: bytes | None = None, **headers: str) -> Answer:
        data = json.dumps(body).encode() if raw is None else raw
        return asyncio.run(exchange(self.app, "POST", path, data, headers))


async def exchange(
    app: Any,
    method: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    gone: asyncio.Event | None = None,
    on_part: Callable[[Answer], Awaitable[None]] | None = None,
) -> Answer:
    """Send a request. The client leaves once `gone` is set, and waits for `on_part` after each part of the answer."""
    answer, gone = Answer(), gone or asyncio.Event()
    parts = [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]

    async def receive() -> dict[str, Any]:
        if parts:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {key.decode(): value.decode() for key, value in message["headers"]}
            return
        answer.parts += [message["body"]] if message["body"] else []
        answer.ended = not message.get("more_body", False)
        if on_part is not None:
            await on_part(answer)

    named = {"content-type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    path, _, query = path.partition("?")
    asked = {"method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": ""}
    peers = {"scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    sent = [(key.encode(), value.encode()) for key, value in named.items()]
    kind = {"type": "http", "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    scope = {**kind, **asked, **peers, "headers": sent}
    await app(scope, receive, send)
    return answer


async def leave(app: Any, path: str, body: dict[str, Any]) -> Answer:
    """Asks, goes away once the engines have nothing more to say, and sees the answer end."""
    gone = asyncio.Event()
    task = asyncio.create_task(exchange(app, "POST", path, json.dumps(body).encode(), {}, gone))
    for _ in range(40):
        await asyncio.sleep(0)
    assert not task.done()
    gone.set()
    return await asyncio.wait_for(task, 5)


class Server:
    """A server, and what stands around its requests."""

    def __init__(
        self,
        engine: Engine,
        keys: Keyring | None = None,
        metrics: ServerMetrics | None = None,
        headers: Mapping[str, str] | None = None,
        config: ServerConfig = ServerConfig(),  # noqa: B008
        **parts: Any,
    ) -> None:
        """`headers`: of each request; `parts`: of its guard."""
        self.engine, self.headers = engine, {**(headers or {})}
        self.metrics, self.admission = metrics or ServerMetrics("tiny"), Admission(config)
        self.app = application(engine, RequestGuard(keys or load_keyring(), self.admission, self.metrics, **parts))
        self.client = Client(self.app)

    def ask(self, **fields: Any) -> Answer:
        return self.client.post(COMPLETIONS, {"prompt": "x", **fields}, **self.headers)

    def samples(self, prefix: str) -> dict[str, float]:
        return counted(self.metrics, prefix)

    def sample(self, line: str) -> float:
        """The value of the sample that begins so."""
        (found,) = (x for x in self.client.get("/metrics").body.decode().splitlines() if x.startswith(line + " "))
        return float(found.rpartition(" ")[2])


def unready(reason: str) -> Health:
    return replace(Health(), ready=False, reason=reason, identity=None)
