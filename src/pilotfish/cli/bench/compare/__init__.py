"""`bench compare`: Pilotfish and others with the same prompts, each in a process of its own. `compare.py` first."""
