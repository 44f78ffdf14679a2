"""Policy without I/O, clock or torch: trees, requests, scheduling, slots, noise."""
