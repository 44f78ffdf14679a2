"""A target, its pools, and a line each way between them that loses, repeats and reorders frames."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any

from hypothesis import strategies as st

POOLS = 2
#: Each with a number that says which line, request or pool is meant.
Event = tuple[str, int]


class Lines:
    """Events on lines. Worlds have their own beside them; each is a method that takes a number."""

    target: Any  # the machine
    leave: Callable[[int], None]  # a pool
    join: Callable[[int], None]
    arrive: Callable[[int, Any], None]  # a frame at the end of a line
    post: Callable[[], None]  # puts what the machines have to say on the lines
    check: Callable[[], None]  # what holds at any time

    def __init__(self) -> None:
        self.lines: list[deque[Any]] = [deque() for _ in range(2 * POOLS)]  # of frames: to the pools, then from them
        self.dialled = {str(i).encode(): i for i in range(POOLS)}  # which are pools of the target, by their peers
        self.peers = (b"%d" % number for number in range(POOLS, 10**6))

    def live(self, events: Iterable[Event]) -> None:
        for event, choice in events:
            getattr(self, event)(choice)
            self.post()
            self.check()

    def line(self, choice: int) -> deque[Any]:
        return self.lines[choice % len(self.lines)]

    def deliver(self, choice: int) -> None:
        for _ in range(1 + choice // 8):
            if self.line(choice):
                self.arrive(choice % len(self.lines), self.line(choice).popleft())

    def deliver_all(self) -> None:
        for number, line in enumerate(self.lines):
            self.deliver(number + 8 * len(line))

    def drop(self, choice: int) -> None:
        if self.line(choice):
            self.line(choice).popleft()

    def repeat(self, choice: int) -> None:
        if self.line(choice):
            self.line(choice).insert(choice // 8 % 3, self.line(choice)[0])

    def reorder(self, choice: int) -> None:
        if self.line(choice):
            frame = self.line(choice).popleft()
            self.line(choice).insert(1 + choice // 8, frame)

    def pool_of(self, number: int) -> Any:
        return next((pool for pool in self.target.pools if self.dialled[pool.peer] == number % POOLS), None)

    def drain(self, choice: int) -> None:
        """Mostly; now and then it is to stay after all."""
        if (pool := self.pool_of(choice)) is not None:
            self.target.drain(pool, choice % 8 < 6)

    def keep_one(self) -> None:
        """A pool is there to stay."""
        if all(pool.draining for pool in self.target.pools):
            self.leave(0)
            self.join(0)


def flipped(frame: bytes, choice: int) -> bytes:
    """With another bit."""
    damaged = bytearray(frame)
    damaged[choice // 8 % len(damaged)] ^= 1 << choice % 8
    return bytes(damaged)


def histories(weights: Mapping[str, float], most: int) -> st.SearchStrategy[list[Event]]:
    names = [name for name, weight in weights.items() for _ in range(max(1, int(weight)))]
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 255)), max_size=most)


def random_events(rng: Random, weights: Mapping[str, float], count: int) -> Iterator[Event]:
    for name in rng.choices(list(weights), list(weights.values()), k=count):
        yield name, rng.randrange(256)
