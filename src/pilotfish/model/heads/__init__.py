"""Trained drafter heads, which guess from the target's hidden states: their files, their modules, their executors."""
