from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.errors import ParameterError
from pilotfish.server.bodies.closed_schema import closed
from pilotfish.server.bodies.requests import GenerationRequest, JsonObject, JsonOfSchema
from pilotfish.server.http_errors import bad, bad_request

FIELD = "structured_outputs"  # of SamplingParams
#: Fields of `structured_outputs` that say which outputs are allowed. All but the last have an older name: guided_json.
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class Wanted:
    field: str
    kind: str  # of KINDS
    value: Any = True
    compact: bool = True  # JSON without optional white space, which a model may write for long

    def constraint(self) -> Constraint:
        with blaming(self.field):
            match self.kind:
                case "json" | "json_object":
                    return Constraint.json(self.schema(), compact=self.compact)
                case "choice":
                    return Constraint.choice(self.value)
                case "regex":
                    return Constraint.regex(self.value)
            return Constraint.grammar(self.value)

    def schema(self) -> dict[str, Any]:
        if self.kind == "json_object":
            return {"type": "object"}
        if isinstance(self.value, dict):
            return closed(self.value)
        try:
            return closed(msgspec.json.decode(self.value, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise bad(self.field, self.value, "a JSON schema, as an object or as its text") from error


def wanted(body: GenerationRequest) -> Wanted | None:
    """HttpError names the second of two fields that both give a constraint."""
    older = [(kind, getattr(body, f"guided_{kind}")) for kind in KINDS[:-1]]
    guided = [Wanted(f"guided_{kind}", kind, value) for kind, value in older if value is not None]
    given = [*_of_format(body), *_of_structured(body), *guided]
    if len(given) > 1:
        raise bad_request(given[1].field, f"it cannot be combined with {given[0].field}")
    return given[0] if given else None


def _of_format(body: GenerationRequest) -> Iterator[Wanted]:
    if isinstance(body.response_format, JsonOfSchema):
        yield Wanted("response_format", "json", body.response_format.json_schema.schema)
    elif isinstance(body.response_format, JsonObject):
        yield Wanted("response_format", "json_object")


def _of_structured(body: GenerationRequest) -> Iterator[Wanted]:
    if (given := body.structured_outputs) is None:
        return
    kinds = [kind for kind in KINDS if getattr(given, kind) is not None]
    if not kinds:
        raise bad_request(FIELD, f"one of {', '.join(KINDS[:-1])} and {KINDS[-1]} is needed")
    compact = given.disable_any_whitespace is not False
    yield from (Wanted(f"{FIELD}.{kind}", kind, getattr(given, kind), compact) for kind in kinds)


@contextmanager
def blaming(field: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise bad_request(field, "it is nested too deep") from error
    except ParameterError as error:
        if error.field != FIELD:
            raise
        problem = str(error).removeprefix(FIELD).removeprefix(":").strip()
        raise ParameterError.described(field, f"{field}: {problem}") from error
