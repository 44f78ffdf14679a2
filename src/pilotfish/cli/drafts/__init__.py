"""Commands about draft pools of any make: whether one keeps the protocol, what it says, how it does at a server."""
