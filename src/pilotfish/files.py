"""Small files that an operator names."""

import os
from collections.abc import Callable
from pathlib import Path

from pilotfish.errors import ParameterError

#: Bytes.
MAX_FILE = 1 << 20


def file_bytes(
    field: str, path: Path, most: int = MAX_FILE, check: Callable[[os.stat_result], None] = lambda _: None
) -> bytes:
    """ParameterError, naming `field`, for a file that cannot be read, or of more than `most` bytes. `check` may refuse
    the file that was opened."""
    try:
        with path.open("rb") as file:
            check(os.fstat(file.fileno()))
            data = file.read(most + 1)
    except OSError as error:
        raise ParameterError(field, str(path), f"a file that can be read ({error.strerror})") from error
    if len(data) > most:
        raise ParameterError(field, str(path), f"a file of at most {most} bytes")
    return data


def file_text(field: str, path: Path, form: str = "text") -> str:
    """ParameterError also for a file that is no UTF-8; `form` is what was expected."""
    try:
        return file_bytes(field, path).decode()
    except UnicodeDecodeError as error:
        raise ParameterError(field, str(path), f"{form} in UTF-8") from error
