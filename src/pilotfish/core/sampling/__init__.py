"""What a token follows from, beside the model: parameters, rules and constraints go in, noise and edits of logits come
out. Begin with `sampling_params.py`, then `noise.py`."""
