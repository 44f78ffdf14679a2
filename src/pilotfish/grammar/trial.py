"""A process of its own tries a grammar first, because llguidance's limits do not bound everything: some grammars take
minutes, or overflow a thread's stack, which ends a process. The trial compiles it with a vocabulary of bytes and the
same special tokens, computes the first masks and takes a token back.

    Grammars ──"grammar"─────────► python -m pilotfish.grammar.trial    a second of the processor's time, 256 MiB,
             ◄──"problem", or null──                                   less stack than any thread here
"""

import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from msgspec import Struct

#: Seconds of the processor's time, bytes of memory and of stack, and levels of nested recursion that a trial may take.
SECONDS, MEMORY, STACK = 1.0, 256 << 20, 3 << 19
TOO_COMPLEX = f"it is too complex: to compile it takes over {SECONDS:g} s, {MEMORY >> 20} MiB, or too deep a recursion"
#: What a step may cost: items and lexer states are a grammar's branches, fuel is the work on regular expressions. Items
#: of a step grow with the vocabulary: of 128,000 tokens plain grammars need over 5000. Those of a row bound what an
#: ambiguous grammar takes: up to 50 ms for a step there.
LIMITS = {
    "max_items_in_row": 500,
    "step_max_items": 50_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
NOTHING = "nothing matches it"
WITHOUT_ROLLBACK = "max_tokens and stop are not supported in a grammar: their tokens cannot be taken back"


class Special(Struct, frozen=True):
    vocab_size: int
    tokens: Mapping[int, str]  # special ones
    eos_ids: Sequence[int]


class Trial:
    """The process starts with the first grammar, and again after one that ended it. Thread-safe."""

    def __init__(self, special: Special) -> None:
        self._special, self._lock = special, Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # of the process; also called when nobody can ask any more

    def problem(self, grammar: str) -> str | None:
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None  # as it was started
            try:
                process.stdin.write(msgspec.json.encode(grammar) + b"\n")
                process.stdin.flush()
                return msgspec.json.decode(process.stdout.readline(), type=str | None)
            except (OSError, msgspec.DecodeError):  # it has ended, maybe within a line
                self._stop()
                return TOO_COMPLEX

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pilotfish.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic's words; what matters is in the answer
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._special) + b"\n")
        return process

    def _stop(self) -> None:
        self._end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # unwritten bytes are lost
        pass


def parser_limits() -> LLParserLimits:
    return LLParserLimits(**LIMITS)  # type: ignore[arg-type]  # one of them is a truth value


def problem_of(matcher: LLMatcher) -> str | None:
    """Does not compile, matches nothing, or takes no token back. Uses up `matcher`."""
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()
    first = next((8 * i + (byte & -byte).bit_length() - 1 for i, byte in enumerate(bits) if byte), None)
    if first is None:
        return NOTHING
    if matcher.consume_token(first):
        matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()
    return None if matcher.rollback(1) else WITHOUT_ROLLBACK


# -- the process


class _Bytes:
    bos_token_id = None

    def __init__(self, special: Special) -> None:
        self.eos_token_id = special.eos_ids[0]
        self.special_token_ids = list(special.tokens)
        tokens = [special.tokens.get(i, "").encode() for i in range(special.vocab_size)]
        self._ids = [i for i in range(special.vocab_size) if i not in special.tokens][:256]
        for byte, i in enumerate(self._ids):
            tokens[i] = bytes([byte])
        self.tokens = tokens

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def _serve() -> None:
    special = msgspec.json.decode(sys.stdin.buffer.readline(), type=Special)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(special)), special.vocab_size, list(special.eos_ids), slices=[])
    for line in sys.stdin.buffer:
        grammar = msgspec.json.decode(line, type=str)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process, wherever it is
        problem = problem_of(LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(problem) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
