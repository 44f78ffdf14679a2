"""The page that `bench run`, `tune` and `serve` draw, from a result's JSON to HTML. `page.py` first."""
