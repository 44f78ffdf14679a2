"""Hand-overs of KV: prompts go in, references to segments of their KV come out. Begin with `prefill_messages.py`, then
`handover_machine.py` (the target's half) and `prefill_machine.py` (the worker's)."""
