"""HTML pages of `explain` and `rollout report`, and charts: elements in, one lone file out. `document.py` first."""
