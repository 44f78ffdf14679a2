"""Whole fleets simulated request by request, for experiments on routing: a plan and traffic come in, figures go out.
Open `fleet.py` first."""
