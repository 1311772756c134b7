"""The protocol between the parent and its workers: messages, pickling, channels and the control page."""
