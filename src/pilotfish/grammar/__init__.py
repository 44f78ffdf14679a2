"""What an output may be, by llguidance: a Constraint is compiled (`compile.py`), followed along a token tree
(`state.py`) and turned into masks beside the step loop (`threads.py`). `compile.py` first."""
