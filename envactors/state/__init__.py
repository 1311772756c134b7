"""States of envs that outlast their processes."""
