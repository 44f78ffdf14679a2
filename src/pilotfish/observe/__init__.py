"""What steps and levels report of themselves."""
