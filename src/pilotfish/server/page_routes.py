from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "playground"
#: Same origin, no inline script, nothing from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time; the tag makes that cheap
}


class _PageFiles(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(PAGE_HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    files = _PageFiles(directory=FOLDER)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return [Route("/", page), Mount("/playground", files)]
