"""The router: admits, plans, opens all legs of a request, is the fence of the hand-off. Start at pipeline.py."""
