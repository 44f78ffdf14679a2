"""Deltas and statuses of targets come in; metrics, traces, feedback and records of requests go out.
Open `request_records.py` first."""
