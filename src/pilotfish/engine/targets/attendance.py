"""What a server counts of its messages with one target, so that no loss goes unnoticed (`wire/serving.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish.wire.serving import SERVING_VERSION, Attend, Beat, Failure, Progress


@dataclass
class Attendance:
    """Everything of it happens in one thread, in the order in which messages are sent and were received."""

    incarnation: str = ""  # of the target; "" while none is known
    sent: int = 0  # Submits, Aborts and Revises to it
    sequence: int = 0  # of the Progress or Failure that comes next

    def attend(self, held: bool = False, heard: int = 0) -> Attend:
        return Attend(SERVING_VERSION, self.incarnation, self.sent, self.sequence, held, heard)

    def follows(self, message: Progress | Failure | Beat) -> bool:
        """Take note of a message; False where some were lost before it: then all requests at the target are over."""
        told = message.sequence
        if isinstance(message, Beat):
            followed, self.sequence = told <= self.sequence, max(told, self.sequence)
        else:
            followed, self.sequence = told == self.sequence, told + 1
        return followed
