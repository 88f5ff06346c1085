"""Public request traces as workloads: one file a format, and what they have in common."""
