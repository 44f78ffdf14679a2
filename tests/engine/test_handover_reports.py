"""Deltas tell of each hand-over once, also of those that come after the first token."""

from __future__ import annotations

from pathlib import Path

from support import SNIPPETS, assert_idle, make_engine

from pilotfish.core.prefilling.handover import HandOver, HandOverReport
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.loads import Loads
from pilotfish.wire.channel import decoded, encode
from pilotfish.wire.serving import SERVER_DECODER, Delta, StepProgress, StepReport

STEP = StepReport(0.0, 0.0, 0.1, 0.0, 0.0, 1, 1, 0, 0, 1, 0, 0.1)


class LatePrefills:
    """Prefill workers that everything is sent to, and that bring nothing in time."""

    def __init__(self) -> None:
        self.under_way: list[HandOver] = []

    def worth_sending(self, *_: object) -> bool:
        return True

    def begin(self, handover: HandOver) -> None:
        handover.report.pool, handover.report.began = "east", 1.0
        self.under_way.append(handover)

    def poll(self) -> None:
        for handover in list(self.under_way):
            self.cancel(handover)

    def cancel(self, handover: HandOver) -> None:
        self.under_way.remove(handover)
        handover.end(0, "late", 3.0)

    def computed(self, tokens: int, seconds: float) -> None:
        """Speeds play no part here."""

    def wait(self) -> None:
        """What was sent has ended with the next `poll`."""


def test_each_hand_over_is_told_of_once(llama: Path) -> None:
    late = HandOverReport("east", outcome="late", began=1.0, seconds=2.0)
    with make_engine(llama, kv_slots=512, prefix_cache=False) as engine:
        scheduler = engine.worker.scheduler
        scheduler.loads = Loads(None, LatePrefills())
        (sample,) = engine.submit(SNIPPETS[0], SamplingParams(max_tokens=4, ignore_eos=True))
        sample.request_id, deltas = 7, list[Delta]()
        while engine.busy:
            deltas += engine.step()
            if len(sample.token_ids) == 2 and not sample.request.stats.preemptions:
                scheduler._preempt()  # it begins again, and finds nothing
        assert [delta.handovers for delta in deltas] == [[late], [], [late], []]
        assert [report["outcome"] for report in sample.stats()["handovers"]] == ["late", "late"]
        sent = decoded(SERVER_DECODER, encode(StepProgress(0, STEP, deltas)))
        assert isinstance(sent, StepProgress) and sent.deltas == deltas
        assert_idle(engine)
