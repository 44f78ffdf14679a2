"""The target worker: verifies trees, samples, owns the truth."""
