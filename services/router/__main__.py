"""`python -m services.router --flags`: one router until SIGTERM or Ctrl-C."""
