"""Plays targets at a drafter of any make, and reports which rules of the protocol that breaks. Open kit.py first."""
