"""The cost model of named devices: `model@device` comes in, seconds of forwards go out. Open `cost.py` first."""
