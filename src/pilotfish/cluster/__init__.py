"""Pilotfish on Ray (an extra): a description of a cluster comes in, processes that Ray places, heals and scales come
out. Requests, guesses and KV travel over our own wire, and nothing else imports Ray. Open `cluster.py` first."""
