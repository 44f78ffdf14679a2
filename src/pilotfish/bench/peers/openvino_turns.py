"""OpenVINO GenAI with and without its prefix cache: seconds to the first token."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import openvino_genai

from pilotfish.bench.peers.openvino_files import exported, greedy, inputs_of, pipeline, properties_of
from pilotfish.bench.peers.protocol import Generated, LoadedPeer, Question, serve, setup_of

WITHOUT, WITH = "off", "on"


class FirstToken(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Knows when the first token came."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0

    def write(self, _: object) -> Any:
        self.at = self.at or time.perf_counter()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def load(text: str) -> LoadedPeer:
    """`text` is a PeerSetup of GGUF files; the draft is not used."""
    setup = setup_of(text)
    target, properties = exported(Path(setup.target)), properties_of(setup.threads, setup.dtype)
    pipelines = {name: pipeline(target, properties, reuse=name == WITH) for name in (WITHOUT, WITH)}
    return LoadedPeer({name: partial(_generate, one) for name, one in pipelines.items()}, setup.dtype)


def _generate(pipe: Any, question: Question) -> Generated:
    """`seconds` are those to the first token."""
    first, config = FirstToken(), greedy(question.max_tokens)
    began = time.perf_counter()
    tokens = pipe.generate(inputs_of(question.prompt), config, first).tokens[0]
    return Generated(seconds=first.at - began, tokens=list(tokens))


if __name__ == "__main__":
    serve(load)
