"""`bench eval` and `bench cascade`: outputs are judged, those that are programs in a sandbox. `success.py` first."""
