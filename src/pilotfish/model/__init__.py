"""All device code: rows of sequences and their KV slots come in, sampled tokens go out; open `executor.py` first.

A device is one class, a subclass of `kernels.Kernels` that `devices.kernels_of` chooses: what it does not override runs
as the reference. It replaces modules of a loaded model in `replace`, and gives heads the modules that they are made of.
"""
