"""Running the inputs of crash bundles again: in a fresh worker, or in this process under a debugger."""
