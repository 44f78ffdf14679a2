"""`bench run` and `bench tune`: settings take turns on the same prompts; tables and JSON go out. `run.py` first."""
