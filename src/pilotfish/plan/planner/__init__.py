"""The hardware to buy: a situation (models, devices, workload, limits) comes in, the best deployment and its
alternatives go out. Open `choice.py` first."""
