"""Profile table: measured seconds of layers, one row a measurement; strict CSV or Parquet in, the
bundled measurements by default.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from planner.errors import ConfigError
from planner.inputs.catalogue import canonical_gpu_type
from planner.inputs.documents import Document, Json, parse_csv, parse_number, read_text

_DATA = Path(__file__).parents[1] / "data"
REQUIRED = (
    "model",
    "gpu_type",
    "dtype",
    "tp_degree",
    "sequence_length",
    "microbatch_sequences",
    "layer",
    "forward_s",
    "backward_s",
)
OPTIONAL = ("update_s", "peak_activation_bytes", "source", "expert_load_spread")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Row of a profile: seconds of one microbatch of `microbatch_sequences` sequences.

    None: not measured. layer: `embedding`, `block`, `head`, or `block:<index>`, which stands for
    all blocks of its kind (equal `LayerSpec`) that have no row. With tp_degree > 1 the
    tensor-parallel communication is included. expert_load_spread: standard deviation of the tokens
    that the block's experts compute of one microbatch, over their mean.
    """

    model: str
    gpu_type: str
    dtype: str
    tp_degree: int
    sequence_length: int
    microbatch_sequences: int
    layer: str
    forward_s: float
    backward_s: float | None = None
    update_s: float | None = None
    peak_activation_bytes: float | None = None
    source: str = ""
    expert_load_spread: float | None = None


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Conditions that a layer time depends on, apart from the microbatch."""

    model: str
    gpu_type: str
    dtype: str
    sequence_length: int
    tp_degree: int


class ProfileTable:
    """Measurements grouped by key, layer and microbatch."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self.measurements = tuple(measurements)
        self._groups: dict[ProfileKey, dict[str, dict[int, Measurement]]] = {}
        for row in self.measurements:
            key = ProfileKey(
                row.model,
                canonical_gpu_type(row.gpu_type),
                row.dtype,
                row.sequence_length,
                row.tp_degree,
            )
            layers = self._groups.setdefault(key, {})
            by_microbatch = layers.setdefault(row.layer, {})
            by_microbatch[row.microbatch_sequences] = row

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({key.model for key in self._groups}))

    @property
    def keys(self) -> tuple[ProfileKey, ...]:
        return tuple(self._groups)

    def layers(self, key: ProfileKey) -> Mapping[str, Mapping[int, Measurement]]:
        """layer name -> microbatch -> measurement; empty where the key was not measured."""
        return self._groups.get(key, {})


def read_profile(path: str | Path) -> ProfileTable:
    """Read CSV or Parquet by the file's suffix.

    Raises:
        ConfigError: a row is wrong; it names the row and the column.
    """
    measurements = [
        _measurement(row, f"row {number} of profile '{path}'")
        for number, row in enumerate(read_table(path, "profile"), 1)
    ]
    return ProfileTable(measurements)


def read_table(path: str | Path, what: str) -> list[Document]:
    """Rows of a CSV or Parquet file, values as they lie there; comment lines start with '#'."""
    rows: list[Document]
    if Path(path).suffix == ".parquet":
        rows = _read_parquet(path, what)
    else:
        _, rows = parse_csv(read_text(path, what), f"{what} '{path}'")
    if not rows:
        raise ConfigError(f"{what} '{path}' has no rows")
    return rows


def _read_parquet(path: str | Path, what: str) -> list[Document]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_table as read_parquet

    try:
        rows: list[Document] = read_parquet(path).to_pylist()
    except OSError as error:
        raise ConfigError(f"cannot read {what} '{path}': {error.strerror or error}") from None
    except ArrowInvalid as error:
        raise ConfigError(f"{what} '{path}' is not a Parquet file: {error}") from None
    return rows


def write_profile(path: str | Path, table: ProfileTable) -> None:
    """Writes CSV or Parquet by the file's suffix."""
    names = [field.name for field in fields(Measurement)]
    rows = [asdict(row) for row in table.measurements]
    if Path(path).suffix == ".parquet":
        from pyarrow import Table
        from pyarrow.parquet import write_table

        write_table(Table.from_pylist(rows), path)
        return
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names)
        writer.writeheader()
        # `csv` writes None as an empty field, which is how a missing measurement is read back
        writer.writerows(rows)


def _measurement(row: Json, what: str) -> Measurement:
    unknown = [key for key in row if key not in REQUIRED + OPTIONAL]
    missing = [key for key in REQUIRED if key not in row]
    if unknown or missing:
        if unknown:
            problem = f"has unknown column '{unknown[0]}'"
        else:
            problem = f"lacks column '{missing[0]}'"
        raise ConfigError(f"{what} {problem}; columns are {', '.join(REQUIRED + OPTIONAL)}")
    layer = _text(row, "layer", what)
    is_one_block = layer.startswith("block:") and layer.removeprefix("block:").isdigit()
    if layer not in ("embedding", "block", "head") and not is_one_block:
        raise ConfigError(
            f"'layer' of {what} is '{layer}'; it must be embedding, block, head or block:<index>"
        )
    return Measurement(
        model=_text(row, "model", what),
        gpu_type=_text(row, "gpu_type", what),
        dtype=_text(row, "dtype", what),
        tp_degree=_count(row, "tp_degree", what),
        sequence_length=_count(row, "sequence_length", what),
        microbatch_sequences=_count(row, "microbatch_sequences", what),
        layer=layer,
        forward_s=_seconds(row, "forward_s", what, required=True) or 0.0,
        backward_s=_seconds(row, "backward_s", what),
        update_s=_seconds(row, "update_s", what),
        peak_activation_bytes=_seconds(row, "peak_activation_bytes", what),
        source=str(row.get("source") or ""),
        expert_load_spread=_seconds(row, "expert_load_spread", what),
    )


def _text(row: Json, column: str, what: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"'{column}' of {what} is empty")
    return value


def _count(row: Json, column: str, what: str) -> int:
    value = parse_number(row[column])
    if not (value >= 1 and value == int(value)):
        raise ConfigError(
            f"'{column}' of {what} must be an integer of at least 1, not {row[column]!r}"
        )
    return int(value)


def _seconds(row: Json, column: str, what: str, *, required: bool = False) -> float | None:
    value = row.get(column)
    if value is None or value == "":
        if required:
            raise ConfigError(
                f"'{column}' of {what} is empty; a layer that was not measured has no row"
            )
        return None
    number = parse_number(value)
    if not 0.0 <= number < math.inf:
        raise ConfigError(f"'{column}' of {what} must be a number of at least 0, not {value!r}")
    return number


@cache
def default_profile() -> ProfileTable:
    """The bundled measurements (data/profiles.csv; sources and licences in data/NOTICE)."""
    return read_profile(_DATA / "profiles.csv")
