"""KV outside the target's slots, as bytes. Objects of 64 tokens are kept in host memory and on disk (`tiers.py` first);
segments of a prefill worker lie in an `arena.py`, which `readers.py` and `nixl.py` read."""
