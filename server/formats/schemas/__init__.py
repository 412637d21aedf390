"""What schemas of parameters mean in formats whose arguments are no JSON."""
