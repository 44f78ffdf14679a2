"""A server that speaks OpenAI's API: which model, which body, whether it still answers."""

import asyncio
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pilotfish.cli.bench.serving.client import CHATS, COMPLETIONS, Exchange, exchange
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.requests import Message, ServerRequest, joined
from pilotfish.cli.reading import PATIENCE, fetched, key_headers, server_url
from pilotfish.errors import EngineError

MODELS, METRICS = "/v1/models", "/metrics"
#: Servers by what they call themselves in the list of models; both tell the tokens of each event if they are asked.
OURS, VLLM = "pilotfish", "vllm"


@dataclass(frozen=True)
class ServedEndpoint:
    url: str
    model: str
    chat: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""  # of the model, as the server says

    def body(self, request: ServerRequest, history: Sequence[Message]) -> dict[str, Any]:
        told = {"continuous_usage_stats": True} if self.owner in (OURS, VLLM) else {}
        messages = [*history, *request.messages]
        asked: dict[str, Any] = {"messages": messages} if self.chat else {"prompt": joined(messages)}
        return {
            "model": self.model,
            **asked,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True, **told},
            **({"speculation": {"metrics": "summary"}} if self.owner == OURS else {}),
            **request.fields,
        }

    async def send(self, request: ServerRequest, history: Sequence[Message]) -> Exchange:
        """OSError where nobody listens."""
        path = CHATS if self.chat else COMPLETIONS
        return await exchange(self.url, path, self.body(request, history), headers=self.headers)

    async def gone(self) -> str:
        """Why it does not answer any more; empty where it does, whatever it says."""
        try:
            async with asyncio.timeout(PATIENCE):
                spoken = await exchange(self.url, MODELS, None, headers=self.headers)
        except TimeoutError:
            return f"it has not answered for {PATIENCE:g} s"
        except OSError as error:
            return error.strerror or str(error)
        return "" if spoken.parts else "it closes connections without an answer"

    def metrics(self) -> str:
        """In Prometheus' text format; empty where it has none."""
        try:
            return fetched(self.url + METRICS, self.headers).decode(errors="replace")
        except (OSError, ValueError):
            return ""


def find_endpoint(options: ServeBenchOptions) -> ServedEndpoint:
    """With its model. ParameterError for an unusable URL or variable; EngineError where the server lists no models."""
    url, headers = server_url("base_url", options.base_url), key_headers(options.api_key_env)
    listed = _listed(url, headers, needed=not options.model)
    model = options.model or listed[0]["id"]
    owner = next((one.get("owned_by") for one in listed if one["id"] == model), None)
    return ServedEndpoint(url, model, options.endpoint == "chat", headers, owner or "")


def _listed(url: str, headers: Mapping[str, str], *, needed: bool) -> list[dict[str, Any]]:
    """The server's models. A server that has no list will do where the model is given."""
    models, why = list[dict[str, Any]](), "lists no model"
    try:
        answer = msgspec.json.decode(fetched(url + MODELS, headers), type=dict[str, Any])
        models = [one for one in answer.get("data") or () if isinstance(one, dict) and "id" in one]
    except urllib.error.HTTPError as error:
        why = f"answers HTTP {error.code}"
    except msgspec.DecodeError as error:
        why = f"is no list of models ({error})"
    except OSError as error:
        reason = getattr(error, "reason", error)
        told = getattr(reason, "strerror", None) or reason
        raise EngineError(f"endpoint: {url} cannot be reached: {told}") from error
    if needed and not models:
        raise EngineError(f"endpoint: {url}{MODELS} {why}; --model names one")
    return models
