"""`bench serve`: requests to any server that speaks OpenAI's API, and what became of them. `command.py` first."""
