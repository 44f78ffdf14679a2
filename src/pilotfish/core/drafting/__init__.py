"""The draft protocol: a target's requests and commits go in, trees of guesses come out. Begin with `messages.py`, then
`target_machine.py` and `draft_machine.py`, which speak it."""
