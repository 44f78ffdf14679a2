"""Which target gets a request: loads and held prefixes go in, a replica comes out. Begin with `router.py`."""
