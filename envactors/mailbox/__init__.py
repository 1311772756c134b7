"""What the two halves share: rows and specs, messages and channels, the control page, infos, pickles."""
