"""Loops around the machines of `core`: frames and requests go in, forwards run, commits, trees and segments come out.
Begin with `target.py`, then `draft.py` and `prefill.py`."""
