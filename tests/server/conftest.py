"""A server over an engine that says what it was told to, and a real one."""

import shutil
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from http_double import Client, Engine, application, saying
from inline_server import inline_server
from live import HttpServer
from openai_cases import CASES
from openai_fleet import ASKED, MAX_BODY, Fleet, running
from openai_fleet import TEMPLATE as FLEETS_TEMPLATE
from structured_cases import CASES as STRUCTURED
from support import write_model, write_tokenizer
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
    own = copy(tokenizer)  # a test may give it another template
    return Engine(own, saying(own, "import os", "return x"))


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
    """Live servers of a tiny model, in all modes."""
    directory = tmp_path_factory.mktemp("fleet")
    target, draft = write_model(directory / "target", "llama"), directory / "draft"
    (target / "chat_template.jinja").write_text(FLEETS_TEMPLATE)
    (target / "generation_config.json").write_text('{"eos_token_id": 0}')
    write_model(draft, "llama", perturbed=0.05)
    options = {"max_body_bytes": MAX_BODY, "metrics": "detailed", "max_queued_requests": 1024}  # all cases at once
    with running(target, draft, CASES, **options) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def bundled() -> Iterator[Fleet]:
    """Live servers of the bundled pair, whose model ends what has a form."""
    pair = resolve_pair("pycode")
    assert pair.draft is not None
    with running(pair.target, pair.draft, STRUCTURED, kv_slots=16384) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from browser import browser, needs_browser

    needs_browser()
    with browser() as chromium:
        yield chromium


@pytest.fixture(params=ASKED)
def mode(request: pytest.FixtureRequest) -> str:
    """Of the server that is asked."""
    return str(request.param)
