"""Engines that generate beside ours, each in a process of its own: JSON lines in and out."""
