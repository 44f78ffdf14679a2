"""What an output may be, by llguidance: a Constraint comes in, masks along a token tree go out, made beside the step
loop (`threads.py`); `compile.py` first. The parsers take text, and give tool calls and reasoning."""
