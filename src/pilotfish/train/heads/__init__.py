"""Heads in training: modules that a gradient goes through, with the tensor names of `heads/spec.py`."""
