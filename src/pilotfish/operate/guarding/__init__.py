"""The guard of a rollout: readings of variants and holdout come in, cuts and trials go out. Open `guard.py` first."""
