"""A Docker engine, a base image and our topology for tests, on a machine that may have none of them."""
