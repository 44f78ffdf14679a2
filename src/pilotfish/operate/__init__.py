"""Variants of speculation under traffic: which requests get which, what came of them, and what that says. No I/O."""
