"""What a server tells of one of its targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pilotfish.wire.serving import Status


@dataclass(frozen=True)
class ReplicaHealth:
    """Whether requests can be sent there, and its last status."""

    name: str
    ready: bool = True
    reason: str = ""  # why not ready, in one line; "" if ready
    retry_after: float = 0.0  # seconds until it may be ready, estimated from the duration of the last start
    restarts: int = 0  # of its process, where the server has started it
    failed: bool = False  # whether it stays down
    requests: int = 0  # of this server, that it has
    status: Status | None = None

    def told(self) -> dict[str, Any]:
        """For whoever asks the server."""
        told = {"name": self.name, "ready": self.ready, "reason": self.reason, "requests": self.requests}
        if self.status is None:
            return told
        load = {"running": self.status.running, "waiting": self.status.waiting, "free_slots": self.status.free_slots}
        identity = self.status.identity
        return {**told, **load, "version": identity.version, "fingerprint": identity.fingerprint}


@dataclass
class RoutedTokens:
    """Tokens of prompts for which a target was chosen."""

    prompt: int = 0
    expected: int = 0  # whose KV the target was believed to have
    found: int = 0  # whose KV it had
    missed: int = 0  # that were believed to be there, and were not

    def count(self, prompt: int, expected: int, found: int) -> None:
        self.prompt += prompt
        self.expected += expected
        self.found += found
        self.missed += max(expected - found, 0)
