"""Heads in training: rows of text and the target's states come in, guesses go out that a gradient goes through. Open
`trainee.py` first; names of tensors are those of `model/heads/spec.py`."""
