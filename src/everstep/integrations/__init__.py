"""Other libraries' ways of saying it: beside the road, and nothing on the road knows of them."""
