"""Why acceptance changed between two windows of time: statistics of cohorts come in, ranked causes with advice go
out. Open `explain.py` first."""
