"""A server with a cascade over two engines that say what they were told to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from http_double import COMPLETIONS, Answer, Client, Engine, ScriptedStream, Submitted, Update, counted, deltas, saying

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.errors import TargetUnavailable
from pilotfish.server.application import make_app
from pilotfish.server.auth import load_keyring
from pilotfish.server.limits import Admission, RequestGuard
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.traffic.canary import ReplayedRequest
from pilotfish.server.traffic.capture import RequestCapture, start_capture
from pilotfish.server.traffic.cascade import Cascade, cascade_setup
from pilotfish.server.traffic.rollout import Rollout
from pilotfish.wire.serving import EngineRequest, Finish

FILE = """
name = "auto"
tags = ["hard"]
longest = 8
tokens = 4
threshold = -0.8
[small]
target = "/models/small"
"""
VARIANTS = 'canary = 1.0\n[[variant]]\nname = "only"\nnodes = 4\n'
STOP = Finish("stop", None)


SMALL, LARGE = "models/small", "tiny"


@dataclass
class NamedEngine(Engine):
    """Takes requests as long as it is ready."""

    name: str = "models/small"
    config: EngineConfig = field(default_factory=lambda: EngineConfig(target=Path("x")))

    def submit(self, requests: Sequence[EngineRequest]) -> ScriptedStream:
        if not self.health.ready:
            raise TargetUnavailable("target: it loads")
        return super().submit(requests)


@dataclass
class CascadeServer:
    """Whose small model is as sure as `sure` says, output by output."""

    small: NamedEngine
    large: NamedEngine
    folder: Path
    text: str = FILE
    sure: list[float] = field(default_factory=lambda: [-0.5])

    def __post_init__(self) -> None:
        self.small.script = self.saying("small talk of it")
        self.large.says("large talk")
        (self.folder / "cascade.toml").write_text(self.text)
        (self.folder / "rollout.toml").write_text(VARIANTS)
        config = ServerConfig(cascade=self.folder / "cascade.toml", rollout=self.folder / "rollout.toml")
        setup = cascade_setup(EngineConfig(target=Path("models/large")), config)
        assert setup is not None
        self.cascade = Cascade(setup, self.large, {})  # type: ignore[arg-type]
        self.cascade.small = self.small  # type: ignore[assignment]
        self.metrics, self.offered = ServerMetrics("tiny"), list[ReplayedRequest]()
        self.rollout = Rollout(config.rollout, self.metrics)
        self.rollout.offer = self.offered.append
        capture = start_capture(ServerConfig(capture=self.folder / "kept", capture_tags=("learn",)), self.metrics)
        assert capture is not None
        self.capture: RequestCapture = capture
        self.admission = Admission(config)
        self.guard = RequestGuard(load_keyring(), self.admission, self.metrics, None, self.rollout, capture)
        self.app = make_app(self.large, config, self.guard, self.cascade)  # type: ignore[arg-type]
        self.client = Client(self.app)

    def saying(self, text: str) -> Any:
        """Each output with the log-probabilities that `sure` has for it."""

        def script(submitted: Submitted) -> Iterator[Update]:
            for index in range(submitted.params.n):
                for delta in deltas(self.small.tokenizer, index, text, submitted, STOP, 2):
                    scored = [TokenLogprobs(t, self.sure[index % len(self.sure)], 1, ()) for t in delta.tokens]
                    yield Update(msgspec.structs.replace(delta, logprobs=scored, verified=[]))

        return script

    def broken(self, count: int, *then: Any) -> Any:
        """So many updates of it, then what else comes."""
        return lambda submitted: [*list(self.saying("small talk of it")(submitted))[:count], *then]

    def ask(self, path: str = COMPLETIONS, **fields: Any) -> Answer:
        body = {"model": "auto", **({"prompt": "x = 1"} if path == COMPLETIONS else {}), **fields}
        return self.client.post(path, body)

    def told(self, **fields: Any) -> tuple[Any, Any]:
        """Who answered, and why it was not the small model."""
        answer = self.ask(**fields)
        assert answer.status == 200, answer.body
        said = answer.json["pilotfish"]
        assert set(said) - {"variant"} == {"answered_by", "escalated", "confidence"}
        return said["answered_by"], said["escalated"]

    def samples(self, name: str) -> dict[str, float]:
        return {sample: count for sample, count in counted(self.metrics, name).items() if count}


def cascaded(tokenizer: Any, folder: Path) -> CascadeServer:
    silent = saying(tokenizer, "")
    return CascadeServer(NamedEngine(tokenizer, silent), NamedEngine(tokenizer, silent, name="models/large"), folder)
