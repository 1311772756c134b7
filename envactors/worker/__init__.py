"""The child: start, one small function a message, the host of the envs, autoreset."""
