"""Options, JSON and files come in; frozen settings of engines, pools and servers come out, checked when made and
declared once: command lines, help and worker processes derive from them. Open `engine.py` first."""
