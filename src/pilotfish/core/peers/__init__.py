"""The half of a protocol between processes that all of them share: greeting, refusing, silence, echoes, error reports.
Machines that dial (a target's) or listen (a draft's, a prefill worker's) build on it. `peer.py` has both halves."""
