"""What an operator does with requests under way: variants of speculation (`rollout.py`), a canary that generates some
of them again, a cascade of two models, and token ids that are kept. Followers of a RequestRecord learn of each."""
