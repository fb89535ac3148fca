"""The result of `Checkpoint.restore`: its assertions about what was restored."""

from __future__ import annotations

from typing import Any

from unison.train.graph import has_state, is_variable, reachable
from unison.train.restoration import SHOWN, Restoration


class CheckpointLoadStatus:
    """The part of a checkpoint that has been restored, including objects that were added later.

    TF: the status object of `tf.train.Checkpoint.restore`.
    """

    def __init__(self, restoration: Restoration):
        #: The restoration.
        self.restoration = restoration

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Asserts that every value of the checkpoint was used, and every variable was restored.

        Raises:
            AssertionError: They were not.
        """
        self.assert_existing_objects_matched()
        report = self.restoration.report
        if report.unused:
            raise AssertionError(
                f"{len(report.unused)} values of checkpoint {self.restoration.archive.prefix} "
                "were not restored, because no object has their names: "
                f"{report.names_of_unused()}. Variables that are not created yet get theirs when "
                "they are."
            )
        return self

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Asserts that every existing variable was restored.

        Raises:
            AssertionError: One was not.
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
            AssertionError: None is.
        """
        unmatched = self._unmatched()
        if len(self.restoration.bound) > 1:
            return self
        raise AssertionError(
            f"Nothing of the program is in checkpoint {self.restoration.archive.prefix}. "
            + (f"It has no value for: {_shown(unmatched)}" if unmatched else "Nothing was given.")
        )

    def expect_partial(self) -> CheckpointLoadStatus:
        """Declares that values may stay unused, so that there is no warning about them."""
        self.restoration.report.expects_partial = True
        return self

    def initialize_or_restore(self, session: Any = None) -> None:
        """Does nothing more: variables have their values. `session` is for TensorFlow 1."""
        del session
        self.restoration.resume()

    run_restore_ops = initialize_or_restore

    def _unmatched(self) -> list[tuple[tuple[str, ...], Any]]:
        """Returns the objects with state, with their paths, that are not in the checkpoint."""
        restoration = self.restoration
        restoration.resume()
        return [
            (path, owner)
            for path, owner in reachable(restoration.root, restoration.parts)
            if (is_variable(owner) or has_state(owner)) and owner not in restoration
        ]


class InitializationOnlyStatus:
    """The result of `restore(None)`: there was no checkpoint."""

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
        """Does nothing: variables have their initial values. `session` is for TensorFlow 1."""
        del session

    run_restore_ops = initialize_or_restore


def _shown(objects: list[tuple[tuple[str, ...], Any]]) -> str:
    shown = [f"{'.'.join(('(root)', *path))} ({owner!r})" for path, owner in objects[:SHOWN]]
    return ", ".join(shown) + (", ..." if len(objects) > SHOWN else "")
