"""The guard of a rollout: readings of variants and the holdout come in each second, cuts and trials go out. Open
`guard.py` first."""
