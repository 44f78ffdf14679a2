"""Variants of speculation under traffic: outcomes of requests come in; assignments, reports, cuts and explanations go
out. Without I/O but for `capture/`. Open `variants.py` first."""
