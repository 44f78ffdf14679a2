"""Traces of requests: off, and OpenTelemetry not imported, unless `--otlp-traces-endpoint` names a collector."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pilotfish.errors import ParameterError

if TYPE_CHECKING:
    from pilotfish.observe.tracing import Tracer


def start_tracing(endpoint: str | None, model_name: str) -> Tracer | None:
    """The tracer of a server; None: it traces nothing."""
    if endpoint is None:
        return None
    url = traces_url(endpoint)
    from pilotfish.observe.tracing import otlp_tracer

    return otlp_tracer(url, model_name)


def traces_url(endpoint: str) -> str:
    """The collector's URL, with OTLP's path /v1/traces where it names none."""
    allowed = "an http:// or https:// URL of an OTLP/HTTP collector, as http://localhost:4318"
    try:
        parts = urlsplit(endpoint)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ParameterError("otlp_traces_endpoint", endpoint, allowed)
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()
