"""What a long work says of itself: on a terminal bars, elsewhere lines. Time is what the test says."""

import io
import threading
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from pilotfish import progress as progress_module
from pilotfish.progress import PhaseProgress, PlannedPhase, about


@dataclass
class Rig:
    terminal: bool = False
    transient: bool = False
    now: float = 100.0
    written: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        console = Console(file=self.written, force_terminal=self.terminal, width=40)
        self.progress = PhaseProgress(console, transient=self.transient, clock=lambda: self.now)

    def after(self, seconds: float) -> list[str]:
        """What is said when so much time has passed."""
        before = self.written.tell()
        self.now += seconds
        self.progress.tell()
        self.written.seek(before)
        return self.written.read().splitlines()


def test_a_phase_says_how_far_it_is_after_two_seconds_and_then_every_half_minute() -> None:
    rig = Rig()
    with rig.progress.phase("training", 400, "steps") as advance:
        assert rig.after(1.9) == []
        assert rig.after(0.1) == ["training: 0 of 400 steps, 2 s so far"]
        for _ in range(29):
            advance(4, note="loss 2.5")
            assert rig.after(1) == []
        assert rig.after(1) == ["training · loss 2.5: 116 of 400 steps, 4 a second, about 71 s left"]
        advance(164)
        assert rig.after(29) == []
        (line,) = rig.after(1)
        assert line.startswith("training: 280 of 400 steps, ")
    assert rig.after(60) == []  # nothing goes on


def test_a_step_that_takes_minutes_is_no_silence() -> None:
    rig = Rig()
    with rig.progress.phase("training", 4, "steps") as advance:
        said = [line for _ in range(30) for line in rig.after(5)]
        assert said == [f"training: 0 of 4 steps, {took} so far" for took in ("5 s", "35 s", "65 s", "95 s", "2 min")]
        for _ in range(2):
            rig.now += 400
            advance()
        assert rig.after(0) == ["training: 2 of 4 steps, 400 s each, about 13 min left"]


def test_short_phases_one_after_the_other_are_no_silence_either() -> None:
    rig, said = Rig(), list[str]()
    for number in range(40):
        with rig.progress.phase(f"part {number}"):
            said += rig.after(1.5)
    assert said == ["part 19: 2 s so far", "part 39: 2 s so far"]


def test_the_whole_is_estimated_once_and_what_follows_is_told_with_each_line() -> None:
    rig = Rig()
    planned = (
        PlannedPhase("text", 500),
        PlannedPhase("training", 200, seconds=3.0),
        PlannedPhase("text", 100),
        PlannedPhase("evaluation", 64),
    )
    with rig.progress.phase("loading"):
        assert rig.after(10) == ["loading: 10 s so far"]  # it is in no plan
    rig.progress.plan(*planned)
    with rig.progress.phase("text", 500, "tokens") as advance:
        said = []
        for _ in range(6):
            said += rig.after(1)
            advance(2)
        assert said == [
            "text: 2 of 500 tokens, 2 s so far",
            "at this pace about 15 min to go: text 4 min, training 10 min, text 50 s (not measured yet: evaluation)",
        ]
        (line,) = rig.after(30)
        assert line == (
            "text: 12 of 500 tokens, 2 a second, about 4 min left, "
            "15 min with what follows (not measured yet: evaluation)"
        )
    with rig.progress.phase("training", 200, "steps") as advance:
        assert rig.after(30) == [
            "training: 0 of 200 steps, 30 s so far, about 10 min left, "
            "11 min with what follows (not measured yet: evaluation)"
        ]
        for _ in range(3):
            rig.now += 20
            advance()
        (line,) = rig.after(0)
        assert line.startswith("training: 3 of 200 steps, 20 s each, about 66 min left, 66 min with")


def test_phases_that_do_not_come_are_forgotten() -> None:
    rig = Rig()
    rig.progress.plan(PlannedPhase("text", 500, 1.0), PlannedPhase("training", 10, 2.0), PlannedPhase("text", 60, 1.0))
    with rig.progress.phase("training", 20, "steps", done=10):
        assert rig.after(6) == [
            "at this pace about 80 s to go: training 20 s, text 60 s",
            "training: 10 of 20 steps, 6 s so far, about 20 s left, 80 s with what follows",
        ]


def test_a_terminal_has_the_estimate_and_no_lines() -> None:
    rig = Rig(terminal=True)
    rig.progress.plan(PlannedPhase("training", 100, 2.0))
    with rig.progress.phase("training", 100, "steps"):
        assert rig.after(4) == []
        assert rig.after(30) == ["at this pace about 3 min to go: training 3 min"]
        assert rig.after(90) == []


def test_work_that_is_mostly_short_says_nothing_for_half_a_minute() -> None:
    rig = Rig(transient=True)
    with rig.progress.phase("rows", 8) as advance:
        advance()
        assert rig.after(29) == []
        advance()
        assert rig.after(1) == ["rows: 2 of 8, 29 s each, about 3 min left"]


def test_names_from_elsewhere_stay_on_one_line() -> None:
    rig = Rig()
    with rig.progress.phase("[red]a\x1b[2J\nb" + "c" * 90, 2, "parts"):
        assert rig.after(2) == ["[red]a\\x1b[2J b" + "c" * 90 + ": 0 of 2 parts, 2 s so far"]


def test_the_last_line_of_a_work_that_is_over() -> None:
    rig = Rig()
    with rig.progress as progress:
        task = progress.begin("parts", 3)
        progress.update(task.id, advance=1)
        rig.now += 10
        progress.update(task.id, advance=2)
        with progress.phase("ended", 5):
            pass
    assert rig.written.getvalue() == "parts: 3 of 3, 5 s each\n"


class Heard(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def write(self, text: str) -> int:
        self.event.set()
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_it_speaks_while_the_work_is_busy(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOWN_AFTER", "LOOKED_AT_EVERY"):
        monkeypatch.setattr(progress_module, name, 0.001)
    heard = Heard()
    with PhaseProgress(Console(file=heard, force_terminal=terminal)) as progress, progress.phase("busy", 5, "parts"):
        assert heard.event.wait(60)
    shown = heard.getvalue()
    assert "busy" in shown and ("0 of 5 parts" in shown) != terminal
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_times_are_rough() -> None:
    seconds = (0.4, 59, 99, 100, 600, 5900, 6000, 90_000)
    assert [about(one) for one in seconds] == ["0 s", "59 s", "99 s", "2 min", "10 min", "98 min", "1.7 h", "25.0 h"]
