"""`kvrelay load`: flags, what they ask for, the run, and what is shown. The generator itself is in kvrelay/load/."""
