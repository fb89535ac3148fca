"""How the replicas of one worker, and several workers, share a dataset."""
