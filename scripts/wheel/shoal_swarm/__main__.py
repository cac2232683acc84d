"""`python -m shoal_swarm` is `shoal`."""

from . import main

main()
