"""A server and its targets. EngineRequests go from async_engine.py through fleet.py to servers.py and target_process.py
in the target's process; Deltas come back the same way, into streams (stream.py)."""
