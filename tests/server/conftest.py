"""A server over an engine that says what it was told to, and a real one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from http_double import Client, Engine, application, saying
from inline_server import inline_server
from live import HttpServer
from openai_fleet import ASKED, MODES, Fleet, running
from support import write_tokenizer
from transformers import AutoTokenizer

from pilotfish.engine.pairs import resolve_pair

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    made = AutoTokenizer.from_pretrained(directory)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def engine(tokenizer: Any) -> Engine:
    return Engine(tokenizer, saying(tokenizer, "import os", "return x"))


@pytest.fixture
def serve(engine: Engine) -> Callable[..., Client]:
    """A client of a server with a configuration."""
    return lambda **config: Client(application(engine, **config))


@pytest.fixture
def client(serve: Callable[..., Client]) -> Client:
    return serve()


@pytest.fixture(scope="session")
def synchronous(llama: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A real server that speculates in step with the target, which has a chat template."""
    target = Path(shutil.copytree(llama, tmp_path_factory.mktemp("chat") / "tiny"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    options = {"budget": "fixed", "default_max_tokens": 8}
    with inline_server(target, draft=draft, mode="sync", **options) as server:
        yield server


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Live servers in all modes."""
    with running(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def bundled() -> Iterator[dict[str, HttpServer]]:
    """Live servers of the bundled pair, by their mode."""
    pair = resolve_pair("pycode")
    options = {"served_model_name": ("pycode",), "kv_slots": 16384, "budget": "fixed"}
    drafts = {mode: None if mode == "off" else pair.draft for mode in MODES}
    with ExitStack() as stack:
        yield {
            mode: stack.enter_context(inline_server(pair.target, mode=mode, draft=draft, **options))
            for mode, draft in drafts.items()
        }


@pytest.fixture(params=ASKED)
def mode(request: pytest.FixtureRequest) -> str:
    """Of the server that is asked."""
    return str(request.param)
