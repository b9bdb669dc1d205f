"""Omnistage: serve any-to-any models as a graph of stages."""
