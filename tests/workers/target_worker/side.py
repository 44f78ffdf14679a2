"""A target's side of the wire, over pools that a test plays and a clock that it moves."""

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec.structs import replace
from support import limits

from pilotfish.core.drafting.messages import PROTOCOL_VERSION, FeatureOffer, Hello, Load, Open, ToDraft, ToTarget, Tree
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.features.features import FeatureSource
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import TokenTree
from pilotfish.wire.channel import Received, decode_to_draft, encode
from pilotfish.wire.pool_users import RemoteDrafter

VOCAB = 100
HELLO = Hello(PROTOCOL_VERSION, "digest", VOCAB, "target")
LIMITS = limits(nodes=8, levels=3)
SAID = TypeVar("SAID", bound=ToDraft)


class Side:
    """A target with pools that a test plays."""

    def __init__(
        self, pools: int = 1, offer: FeatureOffer | None = None, source: FeatureSource | None = None, **options: Any
    ) -> None:
        self.now = 0.0
        self.problems: dict[Peer, str] = {}
        self.posted: list[tuple[Peer, ToDraft]] = []
        self.pools = [DraftPool(f"pool {i}", b"%d" % i) for i in range(pools)]
        self.drafter = RemoteDrafter(
            replace(HELLO, features=offer),
            self.pools,
            lambda peer, *frames: self.posted.extend((peer, decode_to_draft(frame)) for frame in frames),
            RemoteOptions(wanted=256, **options),
            self.problems.get,
            lambda: self.now,
            source,
        )
        for pool in self.pools:
            self.hear(load(), pool.peer)

    def let_pass(self, seconds: float) -> None:
        self.now += seconds
        self.drafter.tick()

    def hear(self, message: ToTarget, peer: Peer = b"0") -> None:
        self.drafter.receive(Received(peer, encode(message)))

    def said(self, kind: type[SAID], peer: Peer = b"0") -> list[SAID]:
        """Messages of a kind to a pool, in order; all are forgotten."""
        said = [message for to, message in self.posted if to == peer and isinstance(message, kind)]
        self.posted = [(to, m) for to, m in self.posted if not (to == peer and isinstance(m, kind))]
        return said

    def drops(self, pool: int = 0) -> dict[str, int]:
        """What was dropped of a pool's messages."""
        return self.pools[pool].drops.occurred

    def propose(self, *requests: Request) -> list[TokenTree]:
        trees = self.drafter.propose(requests, LIMITS)
        self.drafter.flush()
        return [tree.tree() for tree in trees]

    def opened(self, request: Request, peer: Peer = b"0") -> Open:
        """What the pool is told of a request when its tree is asked for."""
        self.propose(request)
        (message,) = self.said(Open, peer)
        return message

    def commit(self, request: Request, *tokens: int) -> bool:
        request.extend(tokens)
        hit = self.drafter.commit(request, tokens)
        self.flush()
        return hit

    def flush(self) -> None:
        self.drafter.gather()
        self.drafter.flush()


def load(sessions: int = 0, own: int = 0, capabilities: Sequence[str] = ()) -> Load:
    return Load("draft", sessions, own, 0, 100, 1.0, 1.0, capabilities=list(capabilities))


def make_request(number: int = 0, prompt: int = 5, salt: str | None = None, **params: object) -> Request:
    p = SamplingParams(**{"max_tokens": 500, "seed": 3, **params})  # type: ignore[arg-type]
    return Request(number, list(range(prompt)), p, 3, frozenset({2}), 10_000, [[4, 5]], salt)


def tree(opened: Open, sequence: int, base_len: int, *nodes: tuple[int, int, int, float]) -> Tree:
    """Of (id, parent, token, score)."""
    columns = [list(x) for x in zip(*nodes, strict=True)] or [[], [], [], []]
    return Tree(opened.session, opened.generation, sequence, base_len, *columns)


NODES = ((1, 0, 7, -0.5), (2, 0, 8, -1.0), (3, 1, 9, -0.25))
