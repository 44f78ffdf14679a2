"""The present targets and pools, in a file that others write while its readers run:

    {"targets": [], "draft_pools": [{"endpoint": "tcp://d:7070", "key": "<40 characters>"}], "prefill_pools": []}

A writer of the file decides where prompts are sent, so its owner must guard it.
"""

import logging
import stat
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from pilotfish.errors import InputError, ParameterError
from pilotfish.files import write_whole
from pilotfish.wire.curve_keys import KeyPair, TargetKeys, public_key
from pilotfish.wire.endpoints import check_spelling

logger = logging.getLogger(__name__)

MAX_FILE = 1 << 22  # bytes of a file: enough for ten thousand members
MAX_NAME = 128  # characters of a name
#: Seconds between two looks at a file, and until what it says is told again without a change: who could not be reached
#: before, because a host's name was not known yet, may be there by now.
PERIOD, REMINDER = 0.25, 1.0
CLOSING = 1.0  # seconds that the thread has to end


class Member(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """InputError for what is no place to listen."""

    endpoint: str  # ipc://PATH or tcp://HOST:PORT
    key: str = ""  # the public half of its key; "": it has none
    name: str = ""
    draining: bool = False  # no new work; it leaves when the present is done

    def __post_init__(self) -> None:
        check_spelling("endpoint", self.endpoint)
        if self.key:
            public_key("key", self.key)
        if len(self.name) > MAX_NAME or not self.name.isprintable():
            raise InputError(f"name: {self.name!r}; expected at most {MAX_NAME} printable characters")

    @property
    def label(self) -> str:
        return self.name or self.endpoint

    def keys(self, own: KeyPair | None, role: str) -> TargetKeys | None:
        """To dial it with. `role` is what it is to who dials: a target, or a draft or prefill pool."""
        if not self.key:
            return None
        if own is None:
            raise ParameterError(f"{role}_key", None, f"a key file, as {self.label} has a key")
        return TargetKeys(own, self.key)


class Members(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """InputError where an endpoint or a name stands twice in one role."""

    targets: tuple[Member, ...] = ()
    draft_pools: tuple[Member, ...] = ()
    prefill_pools: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        for role in self.__struct_fields__:
            members: tuple[Member, ...] = getattr(self, role)
            for shown in ([one.endpoint for one in members], [one.label for one in members]):
                if twice := [text for text, count in Counter(shown).items() if count > 1]:
                    raise InputError(f"{role}: {min(twice)!r} is there twice; expected each endpoint and name once")


def write_members(path: Path, members: Members) -> None:
    """Atomic. For one writer at a time."""
    write_whole(path, msgspec.json.encode(members))


class MembersFile:
    """InputError for an absent or unusable file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = _content(path)
        self.members = _members(path, self._text)
        self._problem = ""

    def poll(self) -> bool:
        """Whether `members` changed. An unusable file changes nothing, and gives one log line."""
        try:
            text = _content(self._path)
            if text == self._text:
                return False
            self._text = text
            found = _members(self._path, text)
        except InputError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("%s; the members stay as they were", error)
            return False
        changed = found != self.members
        self.members, self._problem = found, ""
        return changed


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            raise InputError(f"members: {path} can be written by everyone; expected a file of mode 0644 or less")
        if not path.is_file():
            raise InputError(f"members: {path}; expected a file of JSON")
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
    except OSError as error:
        raise InputError(f"members: {path} cannot be read ({error.strerror}); expected a file of JSON") from error
    if len(text) > MAX_FILE:
        raise InputError(f"members: {path}; expected at most {MAX_FILE} bytes")
    return text


def _members(path: Path, text: bytes) -> Members:
    try:
        return msgspec.json.decode(text, type=Members)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"members: {path}: {error}") from error


class MembersThread:
    def __init__(self, file: MembersFile, tell: Callable[[Members], None]) -> None:
        self._file, self._tell = file, tell
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSING)

    def _run(self) -> None:
        waited = 0.0
        while not self._closing.wait(PERIOD):
            waited += PERIOD
            if self._file.poll() or waited >= REMINDER:
                waited = 0.0
                try:
                    self._tell(self._file.members)
                except Exception:
                    logger.exception("members could not be taken in")
