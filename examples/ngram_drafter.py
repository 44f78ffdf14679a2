"""A whole drafter in one file: n-grams over pyzmq and msgspec, by docs/draft-protocol.md and nothing else.

    python examples/ngram_drafter.py --listen ipc:///tmp/draft.sock

It learns from the prompts and outputs of all targets, and proposes what it has seen follow before. Whoever is served
faster can tell what others wrote: let only those share it who may know.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import math
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import zmq

VERSION = 1  # of the protocol
LOAD_EVERY, SILENCE = 0.25, 10.0  # seconds between reports; after which a target is gone
MAX_TARGETS, MAX_SESSIONS = 256, 1024
MAX_N, MAX_CONTEXTS, FOLLOWERS = 4, 1 << 18, 16  # tokens of a context; contexts, about 400 bytes each; tokens after one
LEARNED = 4096  # the last tokens of a prompt, which are read
PRIOR = 6.0  # occurrences with which a context of one token outweighs what shorter ones say
REST = math.exp(0.5772)  # exp of the noise's mean: for all tokens that were not seen to follow
PUSHED, MAX_NODES, CHILDREN = (
    16,
    256,
    4,
)  # nodes: of one Tree, as few now help more than many later; of a tree; of a node
MIN_SCORE = math.log(0.003)  # of a path that is worth sending

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Sampling(msgspec.Struct, frozen=True):
    temperature: float = 1.0


class Message(msgspec.Struct):
    """The fields that are used here of all messages to a draft. Decoding skips others, and those of later versions."""

    type: str
    version: Natural = 0
    tokenizer: str = ""
    session: Natural = 0
    generation: Natural = 0
    base_len: Natural = 0
    tokens: list[Natural] = []
    max_length: Natural = 0
    seed: Natural = 0
    sampling: Sampling = Sampling()
    wanted: Natural = 0


def noise(seed: int, position: int, token: int) -> float:
    """The g that the target adds to a token's log-probability at `position` (docs/noise-vectors.md)."""
    w = (position & 0xFFFFFFFF, position >> 32, token >> 2, 0)
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):  # Philox4x32-10
        a, b = w[0] * 0xD2511F53, w[2] * 0xCD9E8D57
        w = ((b >> 32) ^ w[1] ^ low, b & 0xFFFFFFFF, (a >> 32) ^ w[3] ^ high, a & 0xFFFFFFFF)
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return -math.log(-math.log((w[token & 3] + 0.5) / 2**32))


class Ngrams:
    """Which tokens followed each context of 1 to MAX_N tokens, and how often. The contexts longest unseen go first."""

    def __init__(self) -> None:
        self.followers: OrderedDict[tuple[int, ...], dict[int, int]] = OrderedDict()

    def learn(self, context: tuple[int, ...], tokens: list[int]) -> None:
        """`tokens` came after `context`."""
        for token in tokens:
            for n in range(1, len(context) + 1):
                counts = self.followers.setdefault(context[-n:], {})
                self.followers.move_to_end(context[-n:])
                counts[token] = counts.get(token, 0) + 1
                if len(counts) > FOLLOWERS:
                    del counts[min(counts, key=counts.__getitem__)]
            context = (*context, token)[-MAX_N:]
        while len(self.followers) > MAX_CONTEXTS:
            self.followers.popitem(last=False)

    def chances(self, context: tuple[int, ...]) -> dict[int, float]:
        """Of what may follow: each context's shares, smoothed by the next shorter one's. At most 1 in all."""
        chances: dict[int, float] = {}
        for n in range(1, len(context) + 1):
            if counts := self.followers.get(context[-n:]):
                total = sum(counts.values()) + PRIOR / n
                chances = {token: chance * PRIOR / n / total for token, chance in chances.items()}
                for token, times in counts.items():
                    chances[token] = chances.get(token, 0.0) + times / total
        return chances


def perturbed(chances: dict[int, float], seed: int, position: int) -> dict[int, float]:
    """Chances to be *sampled*: the target takes the arg max of log-probability + noise, and the noise is known."""
    weights = {token: chance * math.exp(noise(seed, position, token)) for token, chance in chances.items()}
    total = sum(weights.values()) + max(0.0, 1 - sum(chances.values())) * REST
    return {token: weight / total for token, weight in weights.items()}


@dataclass
class Node:
    id: int
    index: int  # of its token in the sequence
    context: tuple[int, ...]  # the last tokens of the sequence up to its own
    score: float  # log of its path's chance, counted from where the tree was planted
    children: dict[int, Node] = field(default_factory=dict)  # by token


class Session:
    """A sequence and the tree below its last token, which grows along the likeliest paths."""

    def __init__(self, opened: Message, ngrams: Ngrams) -> None:
        self.opened, self.ngrams, self.wanted = opened, ngrams, opened.wanted
        self.pushes = 0
        self.ids = itertools.count(1)  # they rise as long as the generation lasts, whatever becomes of the tree
        self.length, recent = len(opened.tokens), opened.tokens[-LEARNED:]
        opened.tokens = []
        ngrams.learn((), recent)
        self.plant(tuple(recent[-MAX_N:]))

    def commit(self, tokens: list[int]) -> None:
        """Re-root: what hangs below the committed tokens stays, here as in the target's copy."""
        self.ngrams.learn(self.root.context, tokens)
        self.length += len(tokens)
        node: Node | None = self.root
        for token in tokens:
            node = node.children.get(token) if node else None
        if node is None:  # a miss
            self.plant((*self.root.context, *tokens)[-MAX_N:])
            return
        below = [node]
        for each in below:
            below.extend(each.children.values())
        alive = {each.id for each in below}
        self.root, self.size = node, len(alive) - 1
        self.frontier = [entry for entry in self.frontier if entry[1] in alive]
        heapq.heapify(self.frontier)

    def plant(self, context: tuple[int, ...]) -> None:
        """A tree of nothing but its root."""
        self.root, self.size = Node(0, self.length - 1, context, 0.0), 0
        self.frontier: list[tuple[float, int, int, Node]] = []  # - score, parent's id, token, parent
        self.expand(self.root)

    def expand(self, node: Node) -> None:
        """Its likeliest children may join the tree."""
        position = node.index + 1
        if position >= self.opened.max_length - 1:
            return  # the sequence ends with such a child: nothing is to be verified after it
        chances = self.ngrams.chances(node.context)
        if self.opened.sampling.temperature > 0:
            chances = perturbed(chances, self.opened.seed, position)
        for token in heapq.nlargest(CHILDREN, chances, key=chances.__getitem__):
            heapq.heappush(self.frontier, (-node.score - math.log(chances[token]), node.id, token, node))

    @property
    def growing(self) -> bool:
        room = self.size < min(self.wanted, MAX_NODES)
        return room and bool(self.frontier) and -self.frontier[0][0] - self.root.score >= MIN_SCORE

    def grow(self) -> dict[str, Any]:
        """A Tree of the next nodes, parents first. Scores are the log-chances of tokens, given their parents' paths."""
        nodes: dict[str, list[Any]] = {"ids": [], "parents": [], "tokens": [], "scores": []}
        while self.growing and len(nodes["ids"]) < PUSHED:
            minus_score, _, token, parent = heapq.heappop(self.frontier)
            node = Node(next(self.ids), parent.index + 1, (*parent.context, token)[-MAX_N:], -minus_score)
            parent.children[token] = node
            self.size += 1
            self.expand(node)
            nodes["ids"].append(node.id)
            nodes["parents"].append(0 if parent is self.root else parent.id)  # the root is 0, whatever id it had
            nodes["tokens"].append(token)
            nodes["scores"].append(min(node.score - parent.score, 0.0))
        self.pushes += 1
        which = {"session": self.opened.session, "generation": self.opened.generation}
        return {"type": "tree", **which, "sequence": self.pushes - 1, "base_len": self.length, **nodes}


@dataclass
class Target:
    route: bytes  # the connection that it was last heard on
    heard: float
    sessions: dict[int, Session] = field(default_factory=dict)
    rows: int = 0


class Drafter:
    """One loop: grow every tree by a little, push, receive, report."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket, self.ngrams = socket, Ngrams()
        self.targets: dict[bytes, Target] = {}  # by incarnation
        self.tokenizer = ""  # the first target's: token ids of two vocabularies cannot be mixed
        self.reported = self.step_ms = self.queue_ms = 0.0
        self.decoder = msgspec.msgpack.Decoder(Message)

    def run(self) -> None:
        while True:
            self.socket.poll(0 if self.push() else 1000 * LOAD_EVERY)
            with contextlib.suppress(zmq.Again):
                for _ in range(256):
                    self.receive(self.socket.recv_multipart(zmq.NOBLOCK))
            if time.monotonic() - self.reported >= LOAD_EVERY:
                self.report()

    def push(self) -> bool:
        """A Tree for each session that still grows; whether there was one."""
        began = time.monotonic()
        growing = [(target, s) for target in self.targets.values() for s in target.sessions.values() if s.growing]
        for target, session in growing:
            tree = session.grow()
            target.rows += len(tree["ids"])
            self.send(target.route, tree)
        if growing:
            self.queue_ms = 1000 * (time.monotonic() - began)  # commits wait for one round at most
            self.step_ms = self.queue_ms / len(growing)
        return bool(growing)

    def receive(self, parts: list[bytes]) -> None:
        """Drops what is no message, and what comes before a Hello, which is a second away at most."""
        try:
            route, incarnation, frame = parts
            message = self.decoder.decode(frame)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            return
        target, handlers = (
            self.targets.get(incarnation),
            {"open": self.open, "commit": self.commit, "close": self.close},
        )
        if message.type == "hello":
            self.greet(route, incarnation, message)
        elif target and message.type in handlers:
            target.route, target.heard = route, time.monotonic()  # it may have reconnected
            handlers[message.type](target, message)

    def greet(self, route: bytes, incarnation: bytes, hello: Message) -> None:
        target = self.targets.get(incarnation)
        self.tokenizer = self.tokenizer or hello.tokenizer
        if hello.version != VERSION or hello.tokenizer != self.tokenizer:
            self.refuse(route, f"expected version {VERSION} and tokenizer {self.tokenizer[:12]}")
        elif target:
            target.route, target.heard = route, time.monotonic()
        elif len(self.targets) < MAX_TARGETS:
            self.targets[incarnation] = Target(route, time.monotonic())
            self.send_load(self.targets[incarnation])

    def open(self, target: Target, message: Message) -> None:
        known = target.sessions.get(message.session)
        if known and known.opened.generation >= message.generation:
            return  # it came twice, or late
        if known or self.num_sessions() < MAX_SESSIONS:
            target.sessions[message.session] = Session(message, self.ngrams)
        else:
            self.refuse(target.route, f"there are {MAX_SESSIONS} already", message.session, message.generation)

    def commit(self, target: Target, message: Message) -> None:
        session = target.sessions.get(message.session)
        generation = session.opened.generation if session else 0
        if not session or message.generation > generation or message.base_len > session.length:
            target.sessions.pop(message.session, None)  # a frame is missing, or this draft is new: ask for an Open
            resync = {"type": "resync", "session": message.session, "generation": message.generation}
            self.send(target.route, {**resync, "reason": f"base_len {message.base_len} does not follow"})
        elif message.generation == generation and message.base_len == session.length:  # else it came twice, or late
            session.wanted = message.wanted
            session.commit(message.tokens)

    def close(self, target: Target, message: Message) -> None:
        session = target.sessions.get(message.session)
        if session and message.generation >= session.opened.generation:
            del target.sessions[message.session]

    def report(self) -> None:
        """Forget the silent; the others hear that this draft lives."""
        now = self.reported = time.monotonic()
        self.targets = {name: target for name, target in self.targets.items() if now - target.heard < SILENCE}
        for target in self.targets.values():
            self.send_load(target)

    def num_sessions(self) -> int:
        return sum(len(target.sessions) for target in self.targets.values())

    def send_load(self, target: Target) -> None:
        sessions, own = self.num_sessions(), len(target.sessions)
        counts = {"sessions": sessions, "own_sessions": own, "own_rows": target.rows}
        load = {"type": "load", "model": "ngram", **counts, "free_slots": MAX_SESSIONS - sessions}
        self.send(target.route, {**load, "step_ms": self.step_ms, "queue_ms": self.queue_ms})

    def refuse(self, route: bytes, reason: str, session: int = 0, generation: int = 0) -> None:
        """Session 0 is the whole connection."""
        self.send(route, {"type": "refuse", "session": session, "generation": generation, "reason": reason})

    def send(self, route: bytes, message: dict[str, Any]) -> None:
        """Lost where nobody is there, or too much waits: ROUTER drops it, and targets notice."""
        self.socket.send_multipart([route, msgspec.msgpack.encode(message)], zmq.NOBLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description="An n-gram drafter for Pilotfish.")
    parser.add_argument("--listen", required=True, metavar="ENDPOINT", help="ipc://PATH or tcp://HOST:PORT")
    endpoint = parser.parse_args().listen
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger, socket.maxmsgsize = 0, 1 << 24
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            parser.error(f"--listen: {endpoint}: {error}")
        with contextlib.suppress(KeyboardInterrupt):
            Drafter(socket).run()


if __name__ == "__main__":
    main()
