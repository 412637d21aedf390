"""How families of models write reasoning and calls of functions: one module per format, chosen by `detect`."""
