"""Sharing a dataset between the replicas of one worker, and between workers."""
