"""Streamed completions for locust, a load tool:

pilotfish serve --pair pycode --port 8000
locust --locustfile examples/locustfile.py --host http://127.0.0.1:8000 --headless --users 16 --run-time 1m
"""

import json
import random
import time

from locust import HttpUser, task

PROMPTS = (
    "def add(a, b):\n    return",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\nfor name in os.listdir('.'):\n",
)


class Reader(HttpUser):
    """Reads one completion after another as it streams. Locust's own time of a streamed request ends with the first
    token; `to the last token` is reported beside it."""

    @task
    def complete(self) -> None:
        body = {"prompt": random.choice(PROMPTS), "max_tokens": random.randint(16, 64), "stream": True}
        began = time.perf_counter()
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as response:
            events = [line for line in response.iter_lines() if line.startswith(b"data: ")]
            ms = 1000 * (time.perf_counter() - began)
            if response.status_code != 200 or events[-1:] != [b"data: [DONE]"] or any(map(broken, events)):
                response.failure(f"status {response.status_code}, last event {events[-1:]}")
        self.environment.events.request.fire(
            request_type="SSE", name="to the last token", response_time=ms, response_length=0
        )


def broken(event: bytes) -> bool:
    return event != b"data: [DONE]" and "error" in json.loads(event.removeprefix(b"data: "))
