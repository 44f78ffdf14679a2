"""schemathesis reads the server's OpenAPI document: answers conform to it, and none is a 500."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from live import HttpServer
from msgspec import structs
from openapi_document import OPERATIONS
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from sizes import sized

#: The last is for whole bodies: the document calls a stream a string, which schemathesis expects of each event.
CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_headers_conformance, response_schema_conformance),
]
#: Fields that bodies cannot do without, beside those that their types require.
NEEDED = {"prompt", "messages", "input"}
#: Fields that say how long an output may be.
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
#: No drawn name is that of a model, or of a request that was served; and this server has no file of variants to reload.
NEVER_WELL = ("model", "feedback", "rollout_reload")
#: Rounds in which a request that the server likes must be drawn.
ATTEMPTS = 8
#: Requests without a body cannot be wrong.
CASES = [(name, mode) for name in OPERATIONS for mode in GenerationMode if mode.is_positive or OPERATIONS[name].body]


@pytest.fixture(scope="module")
def operations(synchronous: HttpServer) -> dict[str, Any]:
    """By their ids."""
    document = schemathesis.openapi.from_url(f"{synchronous.url}/openapi.json")
    found = [result.ok() for result in document.get_all_operations()]
    return {operation.definition.raw["operationId"]: operation for operation in found}


@pytest.fixture(scope="module")
def served(synchronous: HttpServer) -> str:
    """The name of the model."""
    return str(synchronous.get("/v1/models")[1]["data"][0]["id"])


def test_every_operation_is_described(operations: dict[str, Any]) -> None:
    assert operations.keys() == OPERATIONS.keys()


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_operations_are_as_described(name: str, mode: GenerationMode, operations: dict[str, Any], served: str) -> None:
    operation, body = operations[name], OPERATIONS[name].body
    kept = NEEDED | {field.name for field in structs.fields(body) if field.required} if body else NEEDED
    statuses = set()
    most = sized(8, 60) if operation.body else sized(3, 10)

    @settings(max_examples=most, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), optional=st.integers(0, 6))
    def conforms(case: Any, optional: int) -> None:
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):  # a drawn one is never the server's
                case.body["model"] = served
            for name in LIMITS & case.body.keys():  # long outputs take long
                case.body[name] = min(case.body[name], 64) if type(case.body[name]) is int else case.body[name]
        if isinstance(case.body, dict) and mode.is_positive:  # among many fields one is always out of its range
            others = [name for name in case.body if name not in kept]
            case.body = {name: case.body[name] for name in case.body if name not in others[optional:]}
            if operation.label in ("POST /v1/chat/completions", "POST /tokenize") and case.body.get("messages"):
                case.body["messages"] = [_with_its_fields(message) for message in case.body["messages"]]
            if "messages" in case.body and not optional:  # nor which parts and blocks in which turn
                case.body["messages"] = [{"role": "user", "content": "hello"}]
        answer = case.call()
        streamed = answer.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(answer, checks=CHECKS[:-1] if streamed else CHECKS)
        statuses.add(answer.status_code)

    for number in range(ATTEMPTS):
        seed(number)(conforms)()
        if 200 in statuses or mode.is_negative or name in NEVER_WELL:
            return
    raise AssertionError(f"{ATTEMPTS} rounds of examples found no good one: {statuses}")


def _with_its_fields(message: dict[str, Any]) -> dict[str, Any]:
    """The document does not say which fields a message has in which role."""
    own = {"assistant": "tool_calls", "tool": "tool_call_id"}.get(message["role"])
    return {name: value for name, value in message.items() if name == own or name not in ("tool_calls", "tool_call_id")}
