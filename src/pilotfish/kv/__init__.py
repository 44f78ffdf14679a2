"""KV outside the target's slots: its objects, and where they are kept."""
