"""The playground's files over HTTP: same origin, no inline script, nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "playground"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time; the tag makes that cheap
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page, read once."""

    content: bytes
    media_type: str
    tag: str  # an HTTP entity tag

    @classmethod
    def read(cls, path: Path) -> PageFile:
        content = path.read_bytes()
        return cls(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    async def respond(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_routes() -> list[Route]:
    """`/` is the page; `/playground/NAME` are the files that it loads."""
    return [_route(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES]


def _route(path: Path) -> Route:
    where = "/" if path.name == "index.html" else f"/playground/{path.name}"
    return Route(where, PageFile.read(path).respond, methods=["GET"], include_in_schema=False)
