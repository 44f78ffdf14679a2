"""Production's target, drafts and pools in virtual time: an acceptance trace, a setup and a load come in, times of
requests and steps go out. Open `run.py` first."""
