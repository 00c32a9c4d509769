"""Without leaving the loop: a rank is lost, and the others go on."""
