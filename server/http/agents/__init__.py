"""What the routes of the agents' protocols, `responses` and `messages`, have in common."""
