"""`bench compare`: the same prompts for Pilotfish and other engines, each in a process of its own; out go their speeds
and ratios. `compare.py` first."""
