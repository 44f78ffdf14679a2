"""A target's hidden states on their way to trained heads: slots go in, rows for a head's forward come out. Begin with
`features.py`."""
