"""What target and draft say to each other, and how it gets there. Token ids only; no pickle."""
