"""The main decode stage."""
