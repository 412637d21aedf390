"""Version 1 of the protocol; `make proto` writes the modules beside this one."""
