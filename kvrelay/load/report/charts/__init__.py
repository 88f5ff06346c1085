"""The charts of a page, one file a question. Each takes a run's records and gives a Chart; pure."""
