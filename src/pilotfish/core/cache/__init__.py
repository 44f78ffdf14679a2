"""KV bookkeeping: tokens go in, slots that hold their KV come out, on the device and in the tiers below it. Begin with
`slots.py`, then `prefix_cache.py`."""
