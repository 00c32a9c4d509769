"""Out of the trainer's way."""
