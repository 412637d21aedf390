"""What one request produces, on its way from the engine to its reader. Knows tokens and text, no protocol."""
