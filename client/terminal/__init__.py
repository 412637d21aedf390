"""The commands `pilotfish chat` and `pilotfish generate`: a person or a pipe at a running server."""
