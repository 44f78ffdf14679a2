"""A Hugging Face directory comes in, a checked `LoadedModel` goes out; open `loader.py` first. What needs no weights
(`configuration.py`, `metadata.py`, `tensors.py`, `footprint.py`) imports no torch."""
