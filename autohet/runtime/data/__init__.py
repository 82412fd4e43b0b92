"""Training data: text -> tokens -> a memory-mapped Arrow dataset of rows, read in an order that no
fleet can change.
"""

from autohet.runtime.data.build import prepare_dataset
from autohet.runtime.data.dataset import DatasetFacts, TokenDataset
from autohet.runtime.data.sample_order import sample_order, sample_rows

__all__ = ["DatasetFacts", "TokenDataset", "prepare_dataset", "sample_order", "sample_rows"]
