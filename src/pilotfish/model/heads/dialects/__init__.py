"""How publishers lay out heads: each module here makes the one record (`model/heads/spec.py`) of one family's files."""
