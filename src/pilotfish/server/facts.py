"""What a server is and how it is: /v1/models, /health, /ready, /version."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pilotfish.server.answers import Live, Model, Models, Ready, Version
from pilotfish.server.service import Service
from pilotfish.server.texts import json


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["server"])

    def model(name: str) -> Model:
        return Model(name, service.started, service.identity.context)

    @routes.get("/v1/models", operation_id="models")
    async def models(request: Request) -> Response:
        """The one model that is served, by each of its names."""
        service.gate.identify(request)
        return json(Models([model(name) for name in service.names]))

    @routes.get("/v1/models/{name:path}", operation_id="model")
    async def one_model(name: str, request: Request) -> Response:
        """404 for a model that is not served."""
        service.gate.identify(request)
        return json(model(service.name(name)))

    @routes.get("/health", operation_id="health")
    async def health() -> Response:
        """200 as long as the server answers at all."""
        return json(Live())

    @routes.get("/ready", operation_id="ready")
    async def ready() -> Response:
        """503, with the reason, while requests would not be served."""
        health = service.engine.health
        reason = "draining: the server ends once its requests have" if service.gate.closing else health.reason
        return json(Ready(not reason, reason, health.restarts), 503 if reason else 200)

    @routes.get("/version", operation_id="version")
    async def version() -> Response:
        """Pilotfish's."""
        return json(Version(service.version))

    return routes
