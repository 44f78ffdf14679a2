"""Prompts and parameters come in as EngineRequests; tokens and text go out as Deltas. Open engine.py first: one target
in this process; then targets/target_process.py, the loop around it, and targets/async_engine.py, a server's side."""
