"""HTML pages of `explain` and `rollout report`, and charts: elements in, one file out that needs nothing else.
`document.py` first."""
