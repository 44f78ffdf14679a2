"""Folders of token ids of requests whose callers allow it: servers write rows through `store.py`, trainings read them
through `upkeep.py`."""
