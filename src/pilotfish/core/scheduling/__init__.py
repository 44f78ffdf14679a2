"""A target's steps: requests and offered trees go in, rows of a forward come out, and its tokens become commits. Begin
with `scheduler.py`; `executor.py` is the seam to devices."""
