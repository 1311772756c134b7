"""Shared by caller and workers: rows and specs, messages and channels, the control page, infos, pickles."""
