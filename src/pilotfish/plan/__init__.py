"""Devices and models by their public figures, what forwards cost on them, and paces made of that. No torch."""
