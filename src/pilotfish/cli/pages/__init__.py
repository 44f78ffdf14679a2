"""HTML pages and their charts: elements in, one file out that needs nothing else. `document.py` first."""
