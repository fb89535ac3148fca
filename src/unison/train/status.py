"""What `Checkpoint.restore` returns: how much of the checkpoint was restored."""

from __future__ import annotations

from typing import Any

from unison.train.graph import has_state, is_variable, reachable
from unison.train.restoration import SHOWN, Restoration


class CheckpointLoadStatus:
    """How much of a checkpoint has been restored, now that more objects may be there.

    TF: the status object of `tf.train.Checkpoint.restore`.
    """

    def __init__(self, restoration: Restoration):
        #: What matches the checkpoint with the program.
        self.restoration = restoration

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Asserts that every value of the checkpoint went somewhere, and every variable got one.

        Raises:
            AssertionError: That is not so.
        """
        self.assert_existing_objects_matched()
        report = self.restoration.report
        if report.unused:
            raise AssertionError(
                f"{len(report.unused)} values of checkpoint {self.restoration.archive.prefix} "
                "were restored nowhere, for no object has their names: "
                f"{report.names_of_unused()}. Variables that are not created yet get theirs when "
                "they are."
            )
        return self

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Asserts that every variable that exists got a value.

        Raises:
            AssertionError: That is not so.
        """
        unmatched = self._unmatched()
        if unmatched:
            raise AssertionError(
                f"Checkpoint {self.restoration.archive.prefix} has no value for {len(unmatched)} "
                f"objects of the program: {_shown(unmatched)}"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Asserts that an object other than the root is in the checkpoint.

        Raises:
            AssertionError: That is not so.
        """
        unmatched = self._unmatched()
        if len(self.restoration.bound) > 1:
            return self
        raise AssertionError(
            f"Nothing of the program is in checkpoint {self.restoration.archive.prefix}. "
            + (f"It has no value for: {_shown(unmatched)}" if unmatched else "Nothing was given.")
        )

    def expect_partial(self) -> CheckpointLoadStatus:
        """Says that values may be restored nowhere, so that no warning tells it."""
        self.restoration.report.expects_partial = True
        return self

    def initialize_or_restore(self, session: Any = None) -> None:
        """Does nothing more: variables have their values. `session` is TensorFlow 1's."""
        del session
        self.restoration.resume()

    run_restore_ops = initialize_or_restore

    def _unmatched(self) -> list[tuple[tuple[str, ...], Any]]:
        """Returns the objects with a state, with their paths, that the checkpoint does not have."""
        restoration = self.restoration
        restoration.resume()
        return [
            (path, owner)
            for path, owner in reachable(restoration.root, restoration.parts)
            if (is_variable(owner) or has_state(owner)) and owner not in restoration
        ]


class InitializationOnlyStatus:
    """What `restore(None)` returns: there was no checkpoint."""

    def assert_consumed(self) -> InitializationOnlyStatus:
        """Fails: nothing was restored.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError(
            "There was no checkpoint to restore: the path was None, as latest_checkpoint returns "
            "it for a folder without one."
        )

    assert_existing_objects_matched = assert_consumed
    assert_nontrivial_match = assert_consumed

    def expect_partial(self) -> InitializationOnlyStatus:
        """Does nothing."""
        return self

    def initialize_or_restore(self, session: Any = None) -> None:
        """Does nothing: variables have their initial values. `session` is TensorFlow 1's."""
        del session

    run_restore_ops = initialize_or_restore


def _shown(objects: list[tuple[tuple[str, ...], Any]]) -> str:
    shown = [f"{'.'.join(('(root)', *path))} ({owner!r})" for path, owner in objects[:SHOWN]]
    return ", ".join(shown) + (", ..." if len(objects) > SHOWN else "")
