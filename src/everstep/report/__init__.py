"""A run for people who look at it: as a trace, as a page, and while it goes on. Reads, and changes nothing."""
