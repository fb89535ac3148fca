"""The formats of files that Unison reads, and how files are changed; for `fuzzing`."""
