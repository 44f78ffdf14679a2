"""Token trees: a draft's guesses come in, the accepted path comes out. `tree.py` first: trees of one step, and the
walk that verifies them; `lookahead.py` grows those of a draft over many steps, `tree_copy.py` has a target's copy of
them."""
