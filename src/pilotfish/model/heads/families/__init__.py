"""Families of heads: recurrent (EAGLE, MTP), masked (P-EAGLE), block (DFlash, DSpark), Medusa. `table.py` finds the
layout of a directory; layouts with files of their own are `eagle.py`, `mtp.py` and `block_layouts.py`."""
