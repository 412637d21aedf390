"""Makes an EAGLE-3 head for a target: its texts, its hidden states while it wrote them, a head, and its training.

Owns the text and features of a run, the head with its gradients, and the state that a run goes on from. It uses an
engine as any caller does; nothing that serves imports it.
"""
