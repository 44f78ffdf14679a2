"""Token ids of requests whose callers allow it, and of no others, are kept for the training of drafts.

Finished outputs go through a bounded queue to a writer thread (`operate/capture/store`). A full queue or a failed disk
loses captures, never a request or its time."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pilotfish.config.server import ServerConfig
from pilotfish.operate.capture.folder import ClaimedFolder
from pilotfish.operate.capture.rows import CapturedRow, token_bytes
from pilotfish.operate.capture.store import CaptureStore, Retention
from pilotfish.server.auth import Caller
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestFollower, RequestRecord
from pilotfish.server.traffic.rollout import WHOLE
from pilotfish.wire.serving import Delta, Identity

if TYPE_CHECKING:
    from pilotfish.server.bodies.params import Generation

logger = logging.getLogger(__name__)

REFUSAL_HEADER = "x-no-capture"  # header that refuses capture, with any value but 0
#: Bounds of the queue for the disk.
WAITING_REQUESTS, WAITING_TOKENS = 1024, 1 << 20
#: Seconds between two removals of old rows, and between two lines about lost rows.
TIDY, LINE = 60.0, 60.0
#: Seconds that the thread has at the end for the queue.
CLOSING = 2.0
DAY = 86400


@dataclass(eq=False)
class PendingCapture(RequestFollower):
    client: str
    tag: str | None
    temperature: float
    target: Identity
    prompts: Sequence[Sequence[int]]
    outputs: list[list[int]]  # as many of each prompt, one after the other
    offer: "Callable[[PendingCapture], None]"
    ended: float = 0.0  # seconds since the epoch

    def update(self, index: int, delta: Delta) -> None:
        self.outputs[index] += delta.tokens

    def closed(self, record: RequestRecord) -> None:
        if record.reason in WHOLE:
            self.ended = time.time()
            self.offer(self)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(map(len, self.outputs))

    def rows(self) -> list[CapturedRow]:
        each = len(self.outputs) // len(self.prompts)
        return [self._row(self.prompts[index // each], output) for index, output in enumerate(self.outputs) if output]

    def _row(self, prompt: Sequence[int], output: Sequence[int]) -> CapturedRow:
        return CapturedRow(
            time=self.ended,
            prompt=token_bytes(prompt),
            output=token_bytes(output),
            temperature=self.temperature,
            tag=self.tag,
            fingerprint=self.target.fingerprint,
            tokenizer=self.target.tokenizer,
        )


class RequestCapture:
    def __init__(self, store: CaptureStore, tags: Collection[str], metrics: ServerMetrics) -> None:
        self._store, self._tags, self._metrics = store, tags, metrics
        self._changed = threading.Condition()  # around the next four
        self._waiting = deque[PendingCapture]()
        self._tokens = 0  # of them
        self._lost = 0  # since the last line
        self._closing = False
        self._next_line = 0.0  # monotonic seconds
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def begin(
        self, caller: Caller, tag: str | None, headers: Mapping[str, str], generation: "Generation"
    ) -> PendingCapture | None:
        if not (caller.capture or tag in self._tags) or generation.body.only_echo:
            return None
        if headers.get(REFUSAL_HEADER, "0") != "0":
            self._metrics["pilotfish_captured_requests", "refused"].inc()
            return None
        prompts = [prompt.tokens for prompt in generation.prompts]
        outputs = [list[int]() for _ in range(len(prompts) * generation.params.n)]
        temperature = generation.params.temperature
        return PendingCapture(caller.name, tag, temperature, generation.target, prompts, outputs, self.offer)

    def offer(self, one: PendingCapture) -> None:
        with self._changed:
            if len(self._waiting) < WAITING_REQUESTS and self._tokens + one.tokens <= WAITING_TOKENS:
                self._waiting.append(one)
                self._tokens += one.tokens
                self._changed.notify()
                return
        self._lose("more waits for the disk than may")

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSING)

    def _run(self) -> None:
        tidied = -TIDY
        while (one := self._next()) is not None or not self._closing:
            if one is not None:
                self._write(one)
            if time.monotonic() - tidied >= TIDY:
                tidied = time.monotonic()
                try:
                    self._store.tidy()
                except OSError as error:
                    logger.warning("capture: what is too old could not be removed: %s", error)
        self._store.close()

    def _next(self) -> PendingCapture | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing, TIDY)
            one = self._waiting.popleft() if self._waiting else None
            self._tokens -= 0 if one is None else one.tokens
            return one

    def _write(self, one: PendingCapture) -> None:
        try:
            if rows := one.rows():
                self._store.add(one.client, rows)
                self._metrics["pilotfish_captured_requests", "kept"].inc()
        except Exception as error:  # whatever it is, it must not end the thread
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self._metrics["pilotfish_captured_requests", "dropped"].inc()
        with self._changed:
            self._lost += 1
            if time.monotonic() < self._next_line:
                return
            self._next_line = time.monotonic() + LINE
            lost, self._lost = self._lost, 0
        logger.warning("capture: %d requests were not kept since the last such line: %s", lost, reason)


def start_capture(config: ServerConfig, metrics: ServerMetrics) -> RequestCapture | None:
    """None where nothing is kept. ParameterError for a folder that cannot be used."""
    if config.capture is None:
        return None
    retention = Retention(config.capture_days * DAY, int(config.capture_size * (1 << 30)))
    store = CaptureStore(ClaimedFolder(config.capture), retention)
    logger.info("capture: into %s, of keys with capture = true and of tags %s", config.capture, config.capture_tags)
    return RequestCapture(store, frozenset(config.capture_tags), metrics)
