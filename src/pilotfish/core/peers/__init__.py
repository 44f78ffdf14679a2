"""The half of a protocol between processes that all share: messages and the time come in, greetings, refusals, echoes
and silence come out. Machines that dial (a target's) or listen (a draft's) build on it. `peer.py` has both halves."""
