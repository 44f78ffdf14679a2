from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.config.hardware.cost import ForwardLoad, place
from pilotfish.config.hardware.pace import Pace
from pilotfish.core.scheduling.executor import ANY_DEPTH, ForwardSeconds, Outcome, Sampling, SequenceRows
from pilotfish.core.trees.tree import Ints
from pilotfish.errors import ParameterError
from pilotfish.plan.events import VirtualClock
from pilotfish.plan.simulation.acceptance import AcceptanceTrace

#: Seconds of a forward.
Cost = Callable[[ForwardLoad], float]
_COSTS = "model@device as in llama-3.1-70b@h200x4, or times as in 10.4ms or, rows ascending, 1:10.4ms/256:20ms"


def cost_of(field: str, text: str) -> Cost:
    """By the cost model or a pace. ParameterError naming `field`."""
    if "@" in text:
        return place(text, field=field).seconds
    try:
        pace = Pace.parse(text)
    except ParameterError:
        raise ParameterError(field, text, _COSTS) from None
    return lambda load: pace.seconds(load.rows)


class Replay:
    """A request is known by its seed; its output goes on with the trace's next sequence where its own ends."""

    def __init__(self, trace: AcceptanceTrace) -> None:
        self.trace = trace
        self._shifts: list[int] = []  # of each seed: from a position in its sequence to one in the trace

    def add(self, sequence: int, prompt: int) -> int:
        self._shifts.append(int(self.trace.first[sequence]) - prompt)
        return len(self._shifts) - 1

    def places(self, sampling: Sampling) -> Ints:
        """[samples], of each sample's token in the trace."""
        shifts = np.array([self._shifts[seed] for seed in sampling.seeds], np.int64)
        places: Ints = (shifts[sampling.sequences] + sampling.positions) % len(self.trace.tokens)
        return places


@dataclass
class ReplayedModel:
    """Gives the target's tokens or, with children, the draft's guesses; a forward advances `clock` by its `cost`.
    Guesses below a wrong one are never reached, so they are those below the right one."""

    replay: Replay
    cost: Cost
    clock: VirtualClock
    num_slots: int = 1 << 20
    context: int = 1 << 18

    deepest = ANY_DEPTH

    @property
    def vocab_size(self) -> int:
        return self.replay.trace.pair.vocab_size

    def padded(self, rows: int) -> int:
        return rows

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        context = sum(len(sequence.prefix_slots) for sequence in rows) / max(len(rows), 1)
        num_rows = sum(sequence.num_rows for sequence in rows)
        seconds = self.cost(ForwardLoad(rows=num_rows, sequences=len(rows), context=context))
        self.clock.now += seconds
        spent = ForwardSeconds(model=seconds)
        if not len(sampling):
            return Outcome(np.zeros(0, np.int64), seconds=spent)
        places, trace = self.replay.places(sampling), self.replay.trace
        if not sampling.children:
            return Outcome(trace.tokens[places], seconds=spent)
        k = min(sampling.children, trace.width)
        log_chances = trace.log_chances[places, :k]
        if trace.pair.temperature:  # they are chances among those that are asked for (model/sampling.py)
            log_chances = log_chances - np.logaddexp.reduce(log_chances, axis=1, keepdims=True)
        return Outcome(trace.guesses[places, :k], log_chances, seconds=spent)
