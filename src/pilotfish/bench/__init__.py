"""Measure and compare: parity, speed, acceptance, budgets, and where the time of a step goes."""

from pilotfish.bench.app import app

__all__ = ["app"]
