"""HTML pages and their charts: elements in, one file out that needs nothing else. `document.py` first;
`result.py` is the page of `bench run`, `tune` and `serve`, drawn from their JSON."""
