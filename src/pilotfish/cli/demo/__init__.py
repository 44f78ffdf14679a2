"""A pair comes in; its modes, timed beside each other, go out as text, tables and JSON. Open `scenes.py` first."""
