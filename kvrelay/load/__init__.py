"""The load generator: a client of the router. Only the command line imports it."""
