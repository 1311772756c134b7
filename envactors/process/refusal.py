"""The error of a start that is not retried."""


class LaunchRefusedError(OSError):
    """A worker that cannot be started, so that a retry is useless."""
