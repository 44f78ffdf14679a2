"""`bench run` and `bench tune`: settings of speculation take turns on the same prompts. Out go tables and what the page
draws; `run.py` first."""
