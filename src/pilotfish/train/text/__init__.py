"""Text of people, of users and of the target comes in, batches of tokens go out. Open `lessons.py` first."""
