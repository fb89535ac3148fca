"""The facts, one file a topic."""
