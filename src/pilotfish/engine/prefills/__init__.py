"""Prompts that prefill workers compute: the target's side, whose slots get their KV, and the process of a pool. Open
remote_prefills.py first."""
