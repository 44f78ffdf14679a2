"""Commands about variants under traffic: statistics come in, comparisons and causes go out. Open `command.py` first."""
