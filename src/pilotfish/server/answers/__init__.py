"""Outputs of an engine become answers. `stream.py` runs a request; a format (`formats.py` and its subclasses, one for
each API) makes JSON or events of what its outputs have become."""
