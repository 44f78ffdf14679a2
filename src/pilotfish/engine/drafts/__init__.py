"""Drafts of an engine: in its process, in workers and pools, by lookup, or as shadows. A target's configuration comes
in, a Drafter goes out. Open drafters.py first."""
