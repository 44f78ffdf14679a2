"""Commands of the cost model: devices and loads come in, what to buy or expect goes out. Open `command.py` first."""
