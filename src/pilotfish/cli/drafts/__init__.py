"""Commands about draft pools of any make: whether one keeps the protocol, how it does at a server."""
