"""The relay decode stage."""
