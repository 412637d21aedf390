"""Makes an EAGLE-3 head for a target: its texts, its hidden states while it wrote them, a head, and its training.

Contains the text and features of a run, the head with its gradients, and the state from which a run continues. It uses
an engine as any caller does; nothing that serves imports it.
"""
