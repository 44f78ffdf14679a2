"""Training: recipes and texts come in, model directories and heads go out. Open `pair.py` first, or `head.py`."""
