"""Pilotfish on a Ray cluster (an optional extra): Ray places, heals and scales our processes, and tells them of each
other; requests, guesses and KV travel over our own wire. Nothing else imports Ray. Open `cluster.py` first."""
