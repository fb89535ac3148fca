"""All formats of files that Unison reads."""

from fuzzed import backups, checkpoints, datasets, in_memory, jobs, models, records, tables
from fuzzed.format import Format

FORMATS: dict[str, Format] = {
    **checkpoints.FORMATS,
    **backups.FORMATS,
    **models.FORMATS,
    **datasets.FORMATS,
    **records.FORMATS,
    **tables.FORMATS,
    **jobs.FORMATS,
    **in_memory.FORMATS,
}
