"""A Hugging Face directory comes in, a checked `LoadedModel` goes out; open `loader.py` first. What needs no weights
(`configuration.py`, `metadata.py`, `multimodal.py`, `tensors.py`) imports no torch."""
