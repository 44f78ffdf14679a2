from pathlib import Path

from pilotfish.errors import ParameterError

#: Bytes.
MAX_FILE = 1 << 20


def operator_text(field: str, file: Path) -> str:
    """ParameterError, naming `field`, for a file that cannot be read."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE + 1)
    except OSError as error:
        raise ParameterError(field, str(file), f"a file that can be read ({error.strerror})") from error
    if len(data) > MAX_FILE:
        raise ParameterError(field, str(file), f"a file of {MAX_FILE} bytes at most")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ParameterError(field, str(file), "TOML in UTF-8") from error
