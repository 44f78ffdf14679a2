"""What steps, levels and requests report of themselves; metrics and traces of it."""
