"""Sources of elements other than records of files: arrays, and other libraries."""
