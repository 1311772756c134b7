"""The vocabulary between the two halves: messages, pickling with its fallbacks, channels."""
