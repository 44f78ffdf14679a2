"""`bench eval` and `bench cascade`: tasks whose outputs succeed or do not, by judges and, for programs, a sandbox.
`success.py` first."""
