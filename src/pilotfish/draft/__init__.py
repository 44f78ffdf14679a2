"""Drafters: whatever they propose, the target's output stays the same."""
