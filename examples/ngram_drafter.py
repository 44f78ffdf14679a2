"""A whole drafter in one file: n-grams over pyzmq and msgspec, by docs/draft-protocol.md and nothing else.

    python examples/ngram_drafter.py --listen ipc:///tmp/draft.sock

It learns from all prompts and outputs that it sees, and guesses tokens that followed before. A user who is served
faster can infer what others wrote: only users who may know that should share it.
"""

import argparse
import contextlib
import heapq
import math
import signal
import sys
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import msgspec
import zmq

LOAD_EVERY, SILENCE = 0.25, 10.0  # seconds: between Loads (targets wait for 1); until a silent target is forgotten
MAX_SESSIONS, MAX_CONTEXTS = 1024, 1 << 18  # one session more costs another; a fuller table starts anew
CONTEXT, RECENT = 4, 4096  # tokens that are looked up; last tokens of an Open that are learned from
NODES, CHILDREN, CANDIDATES = 24, 4, 8  # of a tree; of a node; the commonest tokens after a context
PRIOR = 6.0  # weight of the shorter contexts, in sightings of a context of one token


def noise(seed: int, position: int, token: int) -> float:
    """The target adds it to a token's log-probability before it takes the best (docs/noise-vectors.md)."""
    w, low, high = (position & 0xFFFFFFFF, position >> 32, token >> 2, 0), seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):  # Philox4x32-10
        a, b = w[0] * 0xD2511F53, w[2] * 0xCD9E8D57
        w = ((b >> 32) ^ w[1] ^ low, b & 0xFFFFFFFF, (a >> 32) ^ w[3] ^ high, a & 0xFFFFFFFF)
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return -math.log(-math.log((w[token & 3] + 0.5) / 2**32))


class Drafter:
    """Answers each Open and Commit with a Tree, and keeps none: the target drops the nodes that it has already."""

    def __init__(self, socket: zmq.Socket) -> None:
        self.socket, self.reported = socket, 0.0
        self.followers = defaultdict(Counter)  # by context, a tuple of tokens: how often each token came next
        self.tokenizer, self.vocab = None, range(0)  # the first target's: ids of two vocabularies cannot be mixed
        self.targets = {}  # by incarnation: its route, when it was heard, its sessions by number, rows grown for it

    def run(self) -> None:
        while True:
            if self.socket.poll(1000 * LOAD_EVERY):
                parts = self.socket.recv_multipart()
                if len(parts) > 2:
                    self.receive(*parts)
            if time.monotonic() - self.reported >= LOAD_EVERY:
                self.report()

    def receive(self, route: bytes, incarnation: bytes, *frames: bytes) -> None:
        for frame in frames:
            with contextlib.suppress(Exception):  # a bad message harms its own session at most
                self.take(route, incarnation, msgspec.msgpack.decode(frame))

    def take(self, route: bytes, incarnation: bytes, message: dict) -> None:
        if message["type"] == "hello":
            if self.tokenizer is None:
                self.tokenizer, self.vocab = message["tokenizer"], range(message["vocab_size"])
            if not message.get("oldest", 1) <= 1 <= message["version"] or message["tokenizer"] != self.tokenizer:
                reason = f"expected version 1 and tokenizer {self.tokenizer[:16]}"
                self.send(route, "refuse", session=0, generation=0, reason=reason)
                return
            self.reported = 0.0  # Load is the answer, at once
            self.targets.setdefault(incarnation, SimpleNamespace(sessions={}, rows=0))
        target = self.targets[incarnation]  # KeyError before its Hello, which comes within a second
        target.route, target.heard = route, time.monotonic()  # it may have reconnected
        handlers = {"open": self.open, "commit": self.commit, "close": self.close}
        if handler := handlers.get(message["type"]):
            handler(target, **message)

    def report(self) -> None:
        """Send Load to all targets, a few times a second, and forget silent ones. After a second without Load a target
        holds back Commits and opens nothing; later it closes its sessions. Long work must call this in between."""
        self.reported = now = time.monotonic()
        self.targets = {name: target for name, target in self.targets.items() if now - target.heard < SILENCE}
        load = {"model": "ngram", "sessions": self.num_sessions(), "free_slots": MAX_SESSIONS - self.num_sessions()}
        for target in self.targets.values():
            own = {"own_sessions": len(target.sessions), "own_rows": target.rows}
            self.send(target.route, "load", **load, **own, step_ms=0.0, queue_ms=0.0)  # times are not measured

    def num_sessions(self) -> int:
        return sum(len(target.sessions) for target in self.targets.values())

    def open(self, target, session, generation, tokens, max_length, seed, sampling, wanted, **_) -> None:
        known = target.sessions.get(session)
        if known and known.generation >= generation:
            return  # repeated, or late
        if not known and self.num_sessions() >= MAX_SESSIONS:  # the next Commit brings it back
            most = max(self.targets.values(), key=lambda target: len(target.sessions))
            del most.sessions[next(iter(most.sessions))]  # idle longest
        state = SimpleNamespace(session=session, generation=generation, max_length=max_length, seed=seed)
        state.sampled = sampling.get("temperature", 1.0) > 0
        state.length, state.context, state.pushes = 0, (), 0
        target.sessions[session] = state
        self.extend(target, state, tokens, wanted)

    def commit(self, target, session, generation, base_len, tokens, wanted, **_) -> None:
        state = target.sessions.get(session)
        known = (state.generation, state.length) if state else (0, 0)
        if (generation, base_len) > known:  # something was lost, or this draft is new
            target.sessions.pop(session, None)
            self.send(target.route, "resync", session=session, generation=generation, reason="tokens are missing")
        elif (generation, base_len) == known:  # else it is repeated, or late
            target.sessions[session] = target.sessions.pop(session)  # the last one now
            self.extend(target, state, tokens, wanted)

    def close(self, target, session, generation, **_) -> None:
        if session in target.sessions and target.sessions[session].generation <= generation:
            del target.sessions[session]

    def extend(self, target, state, tokens: list[int], wanted: int) -> None:
        """Learn what came next, and push a Tree of what may follow."""
        if not all(type(token) is int and token in self.vocab for token in tokens):
            raise ValueError("no token of this vocabulary")  # in the table it would reach all targets
        if len(self.followers) > MAX_CONTEXTS:
            self.followers.clear()
        for token in tokens[-RECENT:]:
            for n in range(1, len(state.context) + 1):
                self.followers[state.context[-n:]][token] += 1
            state.context = (*state.context, token)[-CONTEXT:]
        state.length += len(tokens)
        if nodes := self.grow(state, min(wanted, NODES)):
            tree = dict(zip(("ids", "parents", "tokens", "scores"), zip(*nodes, strict=True), strict=True))
            which = {"session": state.session, "generation": state.generation, "sequence": state.pushes}
            self.send(target.route, "tree", **which, base_len=state.length, **tree)
            state.pushes += 1
            target.rows += len(nodes)

    def grow(self, state, size: int) -> list[tuple[int, int, int, float]]:
        """The likeliest nodes below the last token: id, parent's id, token, score. Parents come first."""
        nodes, leaves = [], [(0.0, 0, 0, 0.0, state.context, state.length)]  # the root, node 0
        while leaves and len(nodes) <= size:
            path, parent, token, score, context, position = heapq.heappop(leaves)
            node = state.length * NODES + len(nodes) if nodes else 0  # ids rise as the length does
            nodes.append((node, parent, token, score))
            if position < state.max_length - 1:  # nothing is verified where the sequence ends
                for chance, token in self.children(state, context, position):
                    below = (*context, token)[-CONTEXT:], position + 1
                    heapq.heappush(leaves, (path - math.log(chance), node, token, math.log(chance), *below))
        return nodes[1:]

    def children(self, state, context: tuple, position: int) -> list[tuple[float, int]]:
        """The likeliest tokens at `position`, after their chances."""
        chances = {}
        for n in range(1, len(context) + 1):  # a longer context leaves a part to the shorter ones
            if counts := self.followers.get(context[-n:]):
                total = counts.total() + PRIOR / n
                chances = {token: chance * PRIOR / n / total for token, chance in chances.items()}
                for token, times in counts.most_common(CANDIDATES):
                    chances[token] = chances.get(token, 0.0) + times / total
        rest = 1 - sum(chances.values())
        if state.sampled:  # the target takes the best of log-probability + noise, and the noise is known
            chances = {token: p * math.exp(noise(state.seed, position, token)) for token, p in chances.items()}
        total = rest + sum(chances.values())
        return heapq.nlargest(CHILDREN, ((chance / total, token) for token, chance in chances.items()))

    def send(self, route: bytes, kind: str, **fields) -> None:
        """ROUTER drops the message if the target is gone or its queue is full; targets notice."""
        self.socket.send_multipart([route, msgspec.msgpack.encode({"type": kind, **fields})], zmq.NOBLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description="An n-gram drafter for Pilotfish.")
    parser.add_argument("--listen", required=True, metavar="ENDPOINT", help="ipc://PATH or tcp://HOST:PORT")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger, socket.maxmsgsize = 0, 1 << 24
        socket.bind(parser.parse_args().listen)
        Drafter(socket).run()


if __name__ == "__main__":
    main()
