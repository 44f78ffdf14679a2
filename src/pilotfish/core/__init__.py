"""Policy of targets and drafts, without I/O, clocks or torch: requests, trees and messages go in, steps, guesses and
messages come out. Begin with `scheduling/scheduler.py` for a target's step, `drafting/draft_machine.py` for a
draft's."""
