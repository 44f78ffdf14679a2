"""Deltas and statuses of targets come in; metrics, traces, feedback and the records of requests behind them go out.
Open `request_records.py` first.
"""
