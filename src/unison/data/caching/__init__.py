"""Elements kept for later passes and programs, in memory and in files."""
