"""Tells servers that choose among targets which prefixes this one holds: all at first, then changes."""

from collections.abc import Callable

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.routing.held_prefixes import HeldPrefixes
from pilotfish.core.routing.held_runs import HeldRuns
from pilotfish.engine.targets.servers import AttendedServer, Servers

#: Seconds between two messages with changes; before a server that still asks for all is told all again.
CHANGES, AGAIN = 0.1, 1.0


class HeldFollowers:
    """For the step loop. Names what the cache holds once the first server asks."""

    def __init__(self, cache: PrefixCache, servers: Servers, clock: Callable[[], float]) -> None:
        self._cache, self._servers, self._clock = cache, servers, clock
        self._prefixes: HeldPrefixes | None = None
        self._told: dict[AttendedServer, float] = {}  # when followers were told all
        self._changed = -CHANGES  # when servers were told last

    def tell(self, idle: bool) -> None:
        """If it is due; at once if nothing will change for a while (`idle`)."""
        now = self._clock()
        if not idle and now - self._changed < CHANGES:
            return
        self._changed = now
        followers = self._servers.followers()
        self._told = {server: self._told[server] for server in followers if server in self._told}
        if not followers:
            return
        if self._prefixes is None:
            self._prefixes = HeldRuns(self._cache).prefixes
        prefixes = self._prefixes
        changes = prefixes.changes()
        for server in followers:
            told = self._told.get(server)
            if told is None or (not server.heard and now - told >= AGAIN):  # it asks for all
                self._told[server] = now
                self._servers.tell_held(server, prefixes.whole())
            elif changes is not None:
                self._servers.tell_held(server, changes)
