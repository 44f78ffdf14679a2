"""Plans of hardware and simulations of speculation, without torch: public tables and runs come in; costs, deployments
to buy and simulated speeds go out. `planner/choice.py` chooses hardware, `simulation/run.py` runs production's policy
in virtual time, `published.py` holds the cost model against published figures."""
