"""Runs one program that a model wrote, in this process, after giving up what the process could do to others. Standard
library alone: `sandbox` starts `python -I -S sandboxed.py LIMITS VERDICT`, with a nonce and the program on stdin.

What is given up, in order: capabilities; files (Landlock) but for reading Python and writing the working directory;
resources (limits); calls of the kernel that start processes, open sockets, or reach other processes (seccomp)."""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import ENOSYS, EPERM
from pathlib import Path
from types import ModuleType

SET_NO_NEW_PRIVS, SET_PDEATHSIG, SET_SECCOMP = 38, 1, 22  # of prctl(2)
SIGKILL = 9

#: Calls that are denied, by their numbers on x86_64 and, where it has them, aarch64.
DENIED: dict[str, list[int]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
#: Calls that are allowed for this very process, whose id is the first argument.
FOR_ITSELF = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}
CLONE, CLONE3, CLONE_THREAD = (56, 220), (435, 435), 0x10000
#: Calls from here on are unknown, as to an older kernel.
NEWEST = 442
#: Of seccomp(2): the architecture's number, by its place in the tables above.
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
#: Of bpf(2): load a word of the call; jump if equal, if at least, if any bit is set; return.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in the call's record
KILL, ERROR, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000

#: Of landlock(7): system calls, rights, and those that each version of it knows.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
FILE_RIGHTS = WRITE_FILE | READ_FILE | TRUNCATE
#: What Python may read beside its own directories.
READABLE = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/etc/ld.so.cache", "/usr/share/zoneinfo")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: Callable[..., int], *arguments: object) -> int:
    """OSError where a call of the kernel fails."""
    if (result := function(*arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def drop_capabilities() -> None:
    """For good: no program that is executed later gains any."""
    _call(_libc.prctl, SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call(_libc.capset, struct.pack("Ii", 0x20080522, 0), bytes(24))


def set_limits(limits: dict[str, int]) -> None:
    """By their names in the module resource, for good. Of time the last second is for whoever heeds the signal."""
    for name, most in limits.items():
        number = getattr(resource, name)
        allowed = resource.getrlimit(number)[1]
        hard = most + (number == resource.RLIMIT_CPU)
        hard = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
        resource.setrlimit(number, (min(most, hard), hard))


def confine_files() -> bool:
    """Whether this kernel has Landlock."""
    version = _libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = RIGHTS[min(version, max(RIGHTS))]
    rules = _call(_libc.syscall, CREATE_RULESET, struct.pack("Q", handled), 8, 0)
    for path in _read_by_python():
        _allow(rules, path, handled & (READ_FILE | READ_DIR))
    _allow(rules, Path("/dev/null"), handled & (READ_FILE | WRITE_FILE))
    _allow(rules, Path.cwd(), handled & ~EXECUTE)
    _call(_libc.syscall, RESTRICT_SELF, rules, 0)
    os.close(rules)
    return True


def _read_by_python() -> set[Path]:
    """Its directories, and those of the libraries that it has loaded."""
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    libraries = {Path(words[5]).parent for words in mapped if len(words) > 5 and words[5].startswith("/")}
    return libraries | {Path(path) for path in (sys.base_prefix, *sys.path, *READABLE)}


def _allow(rules: int, path: Path, rights: int) -> None:
    with suppress(FileNotFoundError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights &= -1 if path.is_dir() else FILE_RIGHTS
        _call(_libc.syscall, ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine_calls() -> None:
    """OSError where this processor or kernel cannot."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(ENOSYS, f"no system calls are known of {platform.machine()}")
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _instructions())
    _call(_libc.prctl, SET_SECCOMP, 2, ctypes.byref(_Filter(len(code) // 8, code)), 0, 0)


def _instructions() -> Iterable[tuple[int, int, int, int]]:
    """Code, jump if true, jump if not, operand."""
    place, architecture = ARCHITECTURES[platform.machine()]

    def call(numbers: Sequence[int], skipped: int) -> tuple[int, int, int, int]:
        return EQUAL, 0, skipped, numbers[place]

    denied, allowed, unknown = ((RETURN, 0, 0, what) for what in (ERROR | EPERM, ALLOW, ERROR | ENOSYS))
    argument = (LOAD, 0, 0, FIRST_ARGUMENT)
    yield from ((LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER))
    yield from ((AT_LEAST, 0, 1, NEWEST), unknown, call(CLONE3, 1), unknown)
    for numbers in DENIED.values():
        if place < len(numbers):
            yield from (call(numbers, 1), denied)
    yield from (call(CLONE, 4), argument, (ANY_BIT, 0, 1, CLONE_THREAD), allowed, denied)
    for own in FOR_ITSELF.values():
        yield from (call(own, 5), argument, (EQUAL, 1, 0, os.getpid()), (EQUAL, 0, 1, 0), allowed, denied)
    yield allowed


def main() -> None:
    """The verdict's first line tells that the program begins, and whether files are confined; the second is the nonce,
    which nobody writes but who has reached the program's end."""
    _call(_libc.prctl, SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    limits, verdict = json.loads(sys.argv[1]), int(sys.argv[2])
    nonce, _, source = sys.stdin.buffer.read().partition(b"\n")
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    drop_capabilities()
    confined = confine_files()
    set_limits(limits)
    confine_calls()
    os.write(verdict, json.dumps({"files": confined}).encode() + b"\n")
    program = sys.modules["program"] = ModuleType("program")
    exec(compile(source, "program.py", "exec"), program.__dict__)
    os.write(verdict, nonce)
    os._exit(0)  # neither threads nor handlers of the program have a say any more


if __name__ == "__main__":
    main()
