"""Across nodes: who keeps what for whom, so that what a lost node held can be computed from the others."""
