"""Messages are one line: the field, the value, and what is allowed. Foreign text has its control characters escaped."""

from collections.abc import Sequence

from pilotfish.printable import one_line, printable


class PilotfishError(Exception):
    def __str__(self) -> str:
        return one_line(super().__str__())


class InputError(PilotfishError, ValueError):
    """The caller's input cannot be used; nothing else is affected. The command line's exit code is 2."""


class ParameterError(InputError):
    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {value!r} is not allowed; expected {allowed}")
        self.field = field

    @classmethod
    def described(cls, field: str, message: str) -> "ParameterError":
        """For a message that another process wrote."""
        error = cls.__new__(cls)
        ValueError.__init__(error, message)
        error.field = field
        return error


class UnknownOptionError(InputError):
    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"{name}: there is no such option; expected one of {', '.join(known)}")


class PromptError(InputError):
    """A prompt that cannot be served: empty, too long, or not of this vocabulary."""


class ModelError(InputError):
    """A model whose weights, architecture or tokenizer cannot be served."""


class WireError(PilotfishError):
    """A frame from another process that is no message, or breaks the protocol: dropped and counted."""


class UnknownTypeError(WireError):
    """A newer side may send a message of an unknown type."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"type: {printable(kind)[:64]} is not known here")
        self.kind = printable(kind)[:64]


class SegmentError(PilotfishError):
    """A segment of KV is missing or differs from its reference, and is not used. `reason` is one word, for counting:
    `stale`, `out_of_range`, `content`, `layout`, `late`, `gone`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"segment: {text}")
        self.reason = reason


class EngineError(PilotfishError, RuntimeError):
    """The engine failed in a way that no input explains. The command line's exit code is 1."""


class RankLost(EngineError):  # noqa: N818  # a state, not a mistake
    """A rank of the target has ended, or is out of step with the others: no forward can run any more."""


class TargetUnavailable(EngineError):  # noqa: N818  # a state, not a mistake
    """The target worker is loading, has ended, or is silent; worth another try after `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
