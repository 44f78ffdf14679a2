"""Bodies whose parts are unions of structs with tags: the part to blame is found by its tag."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec import Struct
from starlette.requests import Request

from pilotfish.config.server import ServerConfig
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.bodies.requests import RequestBody
from pilotfish.server.bodies.schemas import read_body
from pilotfish.server.http_errors import HttpError


class Circle(Struct, tag_field="type", tag="circle", forbid_unknown_fields=True):
    radius: float
    label: str | None = None


class Group(Struct, tag_field="type", tag="group", forbid_unknown_fields=True):
    shapes: list[Circle]


class Drawing(RequestBody, kw_only=True):
    shapes: str | list[Circle | Group]


def read(body: Any) -> Drawing:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": []}
    return asyncio.run(read_body(Request(scope, receive), Drawing, ServerConfig(), Ignored(strict=True)))


def test_a_tag_chooses_the_struct() -> None:
    circle = {"type": "circle", "radius": 2}
    drawing = read({"shapes": [circle, {"type": "group", "shapes": [circle]}]})
    assert drawing.shapes == [Circle(2.0), Group([Circle(2.0)])]


CIRCLE = {"type": "circle", "radius": 1.0}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([CIRCLE, {"type": "square"}], "shapes[1].type: 'square' is not allowed; expected circle or group"),
        ([CIRCLE, {"radius": 1.0}], "shapes[1].type: it is missing"),
        ([{"type": ["circle"]}], "shapes[0].type: ['circle'] is not allowed; expected circle or group"),
        ([{"type": "circle"}], "shapes[0].radius: it is missing"),
        ([{**CIRCLE, "radius": "1"}], "shapes[0].radius: '1' is not allowed; expected a number"),
        ([{**CIRCLE, "shapes": []}], "shapes[0].shapes: there is no such parameter"),
        ([{**CIRCLE, "label": 3}], "shapes[0].label: 3 is not allowed; expected text"),
        ([{"type": "group", "shapes": [CIRCLE, {"type": "group"}]}], "shapes[0].shapes[1].type: 'group'"),
        ([{"type": "group", "shapes": CIRCLE}], "shapes[0].shapes: {'radius': 1.0, 'type': 'circle'} is not allowed"),
        ([3], "shapes[0]: 3 is not allowed; expected an object"),
        (3, "shapes: 3 is not allowed; expected text or a list"),
    ],
)
def test_the_part_to_blame(shapes: Any, message: str) -> None:
    with pytest.raises(HttpError) as raised:
        read({"shapes": shapes})
    assert str(raised.value).startswith(message) and raised.value.status == 400
