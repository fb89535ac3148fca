"""What Python runs first in a process whose `PYTHONPATH` has this folder.

Keras imports scikit-learn, Matplotlib and Requests where they are installed, for wrappers, plots
and a callback that no test uses, and they take longer than Keras itself. Here it is told that they
are not there, as where Unison is installed without extras. A program may import them all the same.
"""

import sys

NOT_FOR_KERAS = ("matplotlib", "requests", "sklearn")


class NotForKeras:
    """Lets nobody find what Keras can do without while Keras is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = getattr(sys.modules.get("keras"), "__spec__", None)
        if name in NOT_FOR_KERAS and getattr(spec, "_initializing", False):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotForKeras)
