"""Makes an EAGLE-3 head for a target: what the target writes, what it saw while it wrote, a head, its training.

Owns the text and features of a run, the head with its gradients, and the state that a run goes on from. It uses an
engine as any caller does; nothing that serves imports it.
"""
