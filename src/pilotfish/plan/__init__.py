"""Public devices and models, the cost of forwards on them, and paces made of that. No torch."""
