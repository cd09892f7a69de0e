"""NumPy, for ``from gazette.lazy_numpy import numpy as np``: imported when one of its names is first used.

The import takes 11 MB and a tenth of a member's start. An idle member decodes and maps nothing without NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as numpy
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)  # The next use costs no more than a name of a module.
            return value

    numpy = _Numpy()
