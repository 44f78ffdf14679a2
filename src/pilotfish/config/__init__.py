"""How engines, draft pools and servers are set up, declared once: command lines and help are derived from here, and
each worker process starts from the same JSON. Frozen; every field is checked when made. Open `engine.py` first."""
