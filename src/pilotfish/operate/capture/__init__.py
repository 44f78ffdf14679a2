"""Folders of token ids that callers allow: servers write by `store.py`, trainings read by `upkeep.py`."""
