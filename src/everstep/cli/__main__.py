"""`python -m everstep.cli`."""

from everstep.cli import main

main()
