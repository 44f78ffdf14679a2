"""Worker processes: started, watched, restarted and ended by a Supervisor; which cores and how much memory each has;
the ranks of a target. Open launch.py first."""
