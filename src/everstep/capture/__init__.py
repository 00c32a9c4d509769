"""Off the device, without stopping it."""
