"""Measure and compare: parity, speed, acceptance, budgets, where the time of a step goes, and drafts elsewhere."""

from pilotfish.bench.app import app

__all__ = ["app"]
