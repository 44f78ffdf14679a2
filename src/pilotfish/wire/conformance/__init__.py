"""The conformance kit of the draft protocol. It plays targets at a drafter of any make, and reports which rules that
breaks. Open kit.py first."""
