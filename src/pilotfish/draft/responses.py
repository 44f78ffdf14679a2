"""Past responses, shared by requests of one tenant and by nobody else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pilotfish.draft.automaton import SuffixAutomaton

#: Salts remembered at a time.
MAX_TENANTS = 1024


class Responses:
    """One tenant's responses in two generations. The young one takes new responses; when it is full it becomes
    the old one, and what that held is forgotten: whole responses, the oldest first, without building anything
    again. So it holds between half of `max_tokens` and all of them once it has been full."""

    def __init__(self, max_tokens: int) -> None:
        self._room = max_tokens // 2  # of a generation
        self._old, self._young = SuffixAutomaton(), SuffixAutomaton()

    @property
    def num_tokens(self) -> int:
        return self._old.num_tokens + self._young.num_tokens

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        """Those that hold anything."""
        return tuple(automaton for automaton in (self._old, self._young) if automaton.num_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember one response; one that no generation could hold is left out."""
        if len(tokens) > self._room:
            return
        if self._young.num_tokens + len(tokens) > self._room:
            self._old, self._young = self._young, SuffixAutomaton()
        self._young.begin()
        self._young.extend(tokens)


class ResponseCache:
    """Responses by tenant. The salt that a request brings is the tenant's name; without one nothing is
    remembered or looked up.

    At most `max_tokens` tokens are held in all, and at most MAX_TENANTS tenants: beyond either the tenant
    whose last use lies longest ago is forgotten. One tenant may fill the cache, so others can tell that it is
    busy, from drafts that they no longer get; of its text they learn nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tenants: OrderedDict[str, Responses] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(tenant.num_tokens for tenant in self._tenants.values())

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def automata(self, salt: str | None) -> tuple[SuffixAutomaton, ...]:
        """What the tenant's responses are matched against: none without a salt, at most two."""
        if salt is None or salt not in self._tenants:
            return ()
        self._tenants.move_to_end(salt)
        return self._tenants[salt].automata

    def add(self, salt: str | None, tokens: Sequence[int]) -> None:
        """Remember a response for requests of the same salt."""
        if salt is None:
            return
        self._tenants.setdefault(salt, Responses(self.max_tokens)).add(tokens)
        self._tenants.move_to_end(salt)
        while self.num_tokens > self.max_tokens or self.num_tenants > MAX_TENANTS:
            self._tenants.popitem(last=False)
