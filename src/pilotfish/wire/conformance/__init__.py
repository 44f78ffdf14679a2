"""A drafter of any make comes in, the rules of the protocol that it breaks come out: played targets ask it. Open
kit.py first."""
