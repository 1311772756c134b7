"""Sessions: actors that are leased for one user at a time, as environments for language agents are."""
