"""Heads in training: modules that a gradient goes through, with the tensor names of `model/heads/spec.py`."""
