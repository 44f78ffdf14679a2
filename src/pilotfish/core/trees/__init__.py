"""Token trees: `tree.py` has those of one step, and the walk that verifies them; `lookahead.py` those that a draft
grows over many steps, and `tree_copy.py` a target's copy of them."""
