"""`bench run` and `bench tune`: settings of speculation take turns on the same prompts. Out go tables, and JSON with
each request; `run.py` first."""
