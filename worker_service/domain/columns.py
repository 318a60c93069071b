"""The type of a plan's columns, and the one block id that the contract gives a meaning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int32]
"""int32 [n]. Columns are numpy arrays so that input preparation stays vectorised."""

NULL_BLOCK = 0
"""Pads block tables; belongs to no sequence."""
