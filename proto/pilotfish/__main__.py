"""`python -m pilotfish`: the same as the command `pilotfish`."""

from pilotfish.server.cli import main

raise SystemExit(main())
