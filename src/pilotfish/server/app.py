"""The server as an ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from pilotfish.config import ServerConfig
from pilotfish.errors import PilotfishError
from pilotfish.server import facts, generation, texts
from pilotfish.server.engine import Engine
from pilotfish.server.envelope import Envelope, on_error
from pilotfish.server.failures import ClientGone, HttpError
from pilotfish.server.gate import Gate, OpenGate
from pilotfish.server.openapi import document
from pilotfish.server.service import Service


def make_app(engine: Engine, config: ServerConfig, gate: Gate | None = None) -> FastAPI:
    """All of OpenAI's routes over `engine`, for whom `gate` lets in (None: everybody). Further routes, metrics and
    pages among them, are added to what is returned; they get request ids and OpenAI's error bodies too."""
    service = Service(engine, config, gate or OpenGate())
    app = FastAPI(
        title="Pilotfish",
        version=service.version,
        description="OpenAI's API over lossless speculative decoding.",
        docs_url=None,  # these pages load assets from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # to where, the client would say
    )
    for kind in (HTTPException, HttpError, PilotfishError, ClientGone):
        app.add_exception_handler(kind, on_error)
    for routes in (generation, texts, facts):
        app.include_router(routes.router(service))
    app.add_middleware(Envelope)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    return app
