"""Programs of others, each in a process of its own, on the same weights and prompts in the same rounds.

Pilotfish needs none of them: one that is not there is reported as not measured. How to install them: `README.md` here.
"""
