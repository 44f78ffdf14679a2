"""Why acceptance changed between two windows: cohorts come in, ranked causes with advice go out. `explain.py` first."""
