"""All constraints of the corpus through a server of each mode, streamed or not."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from constraint_checks import is_valid, may_become_valid
from grammar_corpus import Entry, Regex, Schema, entries
from live import LiveServer

from pilotfish.engine.pairs import resolve_pair

ENTRIES = list(entries())
#: Requests at a time.
STREAMS = 8


@dataclass(frozen=True)
class Answer:
    text: str
    ended: bool


def body_of(entry: Entry, seed: int, temperature: float, stream: bool) -> dict[str, Any]:
    source = entry.source
    if isinstance(source, Schema):
        asked: dict[str, Any] = {"json": source.schema, "disable_any_whitespace": seed % 2 == 0}
    else:
        asked = {"regex": source.pattern} if isinstance(source, Regex) else {"grammar": source.grammar}
    prompt = f'"""{entry.name}"""\nvalue = '
    sampling = {"max_tokens": 512, "seed": seed, "temperature": temperature}
    return {"prompt": prompt, "structured_outputs": asked, "stream": stream, **sampling}


def ask(server: LiveServer, body: dict[str, Any]) -> Answer:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", data, headers)) as response:
        lines = list(_chunks(response) if body["stream"] else [json.load(response)])
    choices = [line["choices"][0] for line in lines if line["choices"]]
    reason = next(choice["finish_reason"] for choice in choices if choice["finish_reason"])
    assert reason in ("stop", "length")
    return Answer("".join(choice["text"] for choice in choices), reason == "stop")


def _chunks(response: Any) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def answers(mode: str, temperature: float, stream: bool, pool: ThreadPoolExecutor) -> list[Answer]:
    pair = resolve_pair("pycode")
    options = {} if mode == "off" else {"draft": pair.draft}
    with LiveServer(pair.target, mode=mode, kv_slots=32768, **options) as server:
        bodies = (body_of(entry, i, temperature, stream) for i, entry in enumerate(ENTRIES))
        return list(pool.map(lambda body: ask(server, body), bodies))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_valid_and_the_same_in_every_mode(temperature: float) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        plain = answers("off", temperature, False, pool)
        for mode, stream in (("off", True), ("sync", False), ("sync", True), ("async", False), ("async", True)):
            assert answers(mode, temperature, stream, pool) == plain, (mode, stream)
    for entry, answer in zip(ENTRIES, plain, strict=True):
        judge = is_valid if answer.ended else may_become_valid
        assert judge(entry, answer.text.rstrip("\ufffd")), (entry.name, answer)
    assert sum(answer.ended for answer in plain) >= 0.8 * len(plain)
