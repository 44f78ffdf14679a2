"""Benches that users run: a command each, as `benches.toml` lists them. In come options of the command line; out go
tables and JSON. `commands.py` runs them all."""
