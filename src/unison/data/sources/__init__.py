"""Where elements come from that are no lines or records of files: arrays, other libraries."""
