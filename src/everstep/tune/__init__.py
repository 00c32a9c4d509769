"""How often: decisions as pure functions of what was measured, each with its formula and its inputs."""
