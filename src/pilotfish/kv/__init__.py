"""KV outside the target's slots: bytes of slots come in and go out. Objects of 64 tokens are kept in host memory and
on disk (`tiers.py` first); segments of a prefill worker lie in an `arena.py`, which is read as shared memory
or by `nixl.py`."""
