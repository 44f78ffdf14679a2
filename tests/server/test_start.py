"""How a server begins: its target may be ready before it has read its model, and what watches the target may fail."""

import time
from pathlib import Path
from typing import Any

import pytest
from inline_server import inline_server

from pilotfish.engine.targets.async_engine import Health
from pilotfish.model.loading import metadata
from pilotfish.server.application import Application


def test_a_server_is_announced_once_it_can_answer(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = metadata.load_tokenizer

    def slowly(directory: Path) -> Any:
        time.sleep(1.0)  # the target is heard of meanwhile
        return load(directory)

    with monkeypatch.context() as patched:
        patched.setattr(metadata, "load_tokenizer", slowly)
        with inline_server(llama) as server:
            status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
            assert status == 200 and answer["usage"]["completion_tokens"]


def test_an_error_in_what_watches_the_targets_ends_the_server(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Application.look

    def failing(application: Application) -> Health:  # other tests' servers run in this process
        if application._setup.server.served_model_name == ("unlucky",):
            raise RuntimeError("unforeseen")
        return look(application)

    monkeypatch.setattr(Application, "look", failing)
    with pytest.raises(RuntimeError, match="unforeseen"), inline_server(llama, served_model_name=("unlucky",)):
        pass
