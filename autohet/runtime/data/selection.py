"""Selection of the data files among those of a directory, glob or prefix.

All selected files are of one kind, and none is a README, a licence or a data card. Each file left
out is listed with the reason.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import PurePath
from typing import NamedTuple

import yaml

from autohet.runtime.data.content import BINARY, POINTER, TABLE, Content, text_format_of
from autohet.runtime.data.records import remedy_for
from planner.errors import ConfigError

logger = logging.getLogger("autohet")
KIND_BY_FORMAT = {
    "parquet": "Parquet",
    "arrow": "Arrow",
    "jsonl": "JSON",
    "json": "JSON",
    "csv": "CSV",
    "text": "text",
}
STRUCTURED = ("Parquet", "Arrow", "JSON", "CSV")
NAMES_SHOWN = 3
ABOUT_DATA = "describes data"
UNKNOWN = "unknown ending"
WITHOUT_FIELD = "JSON without the text field"
NOT_OF_SPLIT = "not of the train split of the data card"
HELD_OUT = "of another split than train"
PULL = "run `git lfs pull` in its clone"
_CARD = re.compile(
    r"(readme|licen[cs]es?|copying|notice|citation|contributing|changelog|authors"
    r"|code_of_conduct|(data|dataset|model)[-_ ]?card|datasheet)([-_. ].*)?",
    re.IGNORECASE,
)
_CARD_SUFFIXES = frozenset({"", ".md", ".txt", ".rst", ".text", ".html", ".cff", ".bib"})
_CARD_KEYS = re.compile(
    rb"^(dataset_info|task_categories|size_categories|pretty_name|annotations_creators|configs):",
    re.MULTILINE,
)
_SPLIT = re.compile(
    r"(?:^|[/_.-])(train(?:ing)?|validation|valid|val|dev|test(?:ing)?|eval|h[eo]ld[-_]?out)"
    r"(?=[/_.-]|$)",
    re.IGNORECASE,
)
_SHARD = re.compile(r"data/(.+)-\d{5}-of-\d{5}\..+")
"""Name of a file of a split, as `datasets` writes it."""
_METADATA_NAMES = frozenset(
    {
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
        "croissant.json",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
)


class SourceFile(NamedTuple):
    """File to read: a local path or s3:// URI, its format, its size, and a mark of its version."""

    name: str
    format: str
    size_bytes: int
    mark: str
    compression: str | None = None
    """Compression detected from the content; None: uncompressed, or not inspected."""


class Candidate(NamedTuple):
    """File found in a source, before selection.

    `label`: its name relative to the source; `raw`: its first bytes.
    """

    file: SourceFile
    label: str
    content: Content
    raw: bytes = b""
    has_field: bool = True
    """False if the file's first record or its columns lack the text field."""

    @property
    def fields(self) -> str:
        """List the fields of the file's first record."""
        return ", ".join(sorted(self.content.record or {}))

    @property
    def kind(self) -> str:
        return KIND_BY_FORMAT.get(self.content.format, "")

    def source_file(self, file_format: str | None = None) -> SourceFile:
        return self.file._replace(
            format=file_format or self.content.format, compression=self.content.compression
        )


class LeftOut(NamedTuple):
    """File of a source that is not read, and the reason."""

    label: str
    reason: str


class Selection(NamedTuple):
    """Files to read, in order, and files left out."""

    files: list[SourceFile]
    left_out: list[LeftOut]


def select_single(candidate: Candidate, file_format: str) -> Selection:
    """Select the one file that a source names, whatever its name.

    Raises:
        ConfigError: no reader can read its content.
    """
    name = candidate.file.name
    problem = candidate.content.problem
    if file_format != "auto":
        return Selection([candidate.source_file(file_format)], [])
    if problem == TABLE:
        raise ConfigError(
            f"data.source {name} is {problem} with the columns {candidate.fields};"
            f" {remedy_for(candidate.content.record or {}, 'name one of them in data.text_field')},"
            " or set data.format: text to train on its lines as they are"
        )
    if problem == POINTER:
        raise ConfigError(f"data.source {name} is {problem}; {PULL}")
    if problem:
        raise ConfigError(
            f"data.source {name} is {problem}; name text, JSON lines, Parquet or Arrow files"
        )
    return Selection([candidate.source_file()], [])


def select_of_many(source: str, candidates: Sequence[Candidate], file_format: str) -> Selection:
    """Select the files of one kind among those of a directory, glob or prefix.

    Structured files that hold the text are preferred to text files. Among structured kinds, or if
    no file holds the text, the kind with most bytes is selected.

    Raises:
        ConfigError: no file is left, or the content of some files is missing (Git LFS).
    """
    pointers = []
    for candidate in candidates:
        is_pointer = candidate.content.problem == POINTER
        if is_pointer and text_format_of(candidate.label) is not None:
            pointers.append(candidate.label)
    if pointers:
        what = f"{len(pointers)} of {len(candidates)} files of data.source {source!r}"
        raise ConfigError(f"{what} ({pointers[0]}, ...) are each {POINTER}; {PULL}")
    left_out: list[LeftOut] = []
    usable: list[Candidate] = []
    for candidate in candidates:
        reason = _reason_against(candidate, file_format)
        if reason:
            left_out.append(LeftOut(candidate.label, reason))
        else:
            usable.append(candidate)
    usable, unknown = _by_ending(usable, file_format)
    left_out += [LeftOut(each.label, UNKNOWN) for each in unknown]
    labels = [each.label for each in usable]
    named = _train_split_of_card(source, candidates, labels)
    by_card = named or labels
    left_out += [LeftOut(label, NOT_OF_SPLIT) for label in labels if label not in by_card]
    usable = [each for each in usable if each.label in by_card]
    if not usable:
        raise ConfigError(
            f"data.source {source!r} holds no text, JSONL or Parquet file to train on"
            f" ({describe_left_out(left_out) or 'it is empty'}); {_remedy(left_out)}"
        )
    kind = _chosen_kind(usable) if file_format == "auto" else KIND_BY_FORMAT[file_format]
    forced = file_format if file_format == "text" else None
    chosen: list[SourceFile] = []
    chosen_labels: list[str] = []
    held_out = _held_out(by_card)
    splits = {_split_of(label) for label in labels if label not in held_out}
    if kind in STRUCTURED and len(splits) > 1 and not named:
        raise _unclear(source, "splits", splits)
    for candidate in usable:
        if candidate.label in held_out and kind in STRUCTURED:
            left_out.append(LeftOut(candidate.label, HELD_OUT))
        elif file_format == "text" or candidate.kind == kind:
            chosen.append(candidate.source_file(forced))
            chosen_labels.append(candidate.label)
        else:
            left_out.append(LeftOut(candidate.label, f"{candidate.kind}, not {kind}"))
    if not chosen:
        raise ConfigError(
            f"data.source {source!r} holds no {kind} file, which data.format {file_format} asks"
            f" for ({describe_left_out(left_out)}); leave data.format out, or name another source"
        )
    others = held_out.intersection(chosen_labels)
    if others:
        logger.warning(
            "data.source %r: %d text files that are named as validation or test data are trained"
            " on, too (%s, ...); to hold them out, name the others, as %s/**/*train*",
            source,
            len(others),
            min(others),
            source.rstrip("/"),
        )
    return Selection(chosen, left_out)


def _split_of(label: str) -> str:
    """Return the split that a file's name says it is a shard of; empty if it says none."""
    found = _SHARD.fullmatch(label)
    return found[1] if found else ""


def _held_out(labels: Sequence[str]) -> set[str]:
    """Return the names of validation or test data, if others are those of a train split.

    The datasets library reads the train split of such a directory.
    """
    if any(_split_of(label) == "train" for label in labels):
        return {label for label in labels if _split_of(label) != "train"}
    others: set[str] = set()
    has_train = False
    for label in labels:
        splits = {split.lower() for split in _SPLIT.findall(label)}
        if any(split.startswith("train") for split in splits):
            has_train = True
        elif splits:
            others.add(label)
    return others if has_train else set()


def _unclear(source: str, what: str, names: Iterable[str]) -> ConfigError:
    """Return the error of a data set with several subsets or splits, none of which is default."""
    return ConfigError(
        f"data.source {source!r} is a data set with the {what} {', '.join(sorted(names))}; name the"
        f" files of one, or read the directory as {{path: hf://DIRECTORY, {what[:-1]}: NAME}}"
    )


def _train_split_of_card(
    source: str, candidates: Sequence[Candidate], labels: list[str]
) -> list[str]:
    """Return those of the files that a data card names as the default subset's train split.

    Empty if there is no card, or it names none of them.

    Raises:
        ConfigError: the card has several subsets and no default, or no train split.
    """
    cards = [each.raw for each in candidates if each.label.lower() == "readme.md"]
    try:
        subsets = yaml.safe_load(cards[0].split(b"\n---", 1)[0])["configs"]
        given = {str(each["config_name"]): each for each in subsets}
        named = [each["config_name"] for each in subsets if each.get("default")]
        named += [name for name in given if name == "default" or len(given) == 1]
        chosen = given[named[0]] if named else {}
        files = chosen.get("data_files", chosen.get("data_dir"))
    except (LookupError, TypeError, ValueError, AttributeError, yaml.YAMLError):
        return []
    if not named:
        raise _unclear(source, "subsets", given)
    if files is None:
        return []
    if isinstance(files, list) and all(isinstance(each, dict) for each in files):
        files = {each.get("split", "train"): each.get("path", ()) for each in files}
    if isinstance(files, dict) and "train" not in files:
        raise _unclear(source, "splits", files)
    paths = files["train"] if isinstance(files, dict) else files
    patterns = [paths] if isinstance(paths, str) else paths
    return [label for label in labels if any(_is_named(label, each) for each in patterns)]


def _is_named(label: str, pattern: str) -> bool:
    folder = f"{pattern.rstrip('/')}/*"
    wanted = pattern.replace("**/", "*")
    return fnmatch(label, wanted) or fnmatch(label, folder)


def _reason_against(candidate: Candidate, file_format: str) -> str:
    """Return the reason why a file is no data, judged by itself; empty if it may be data."""
    path = PurePath(candidate.label)
    content = candidate.content
    if _CARD.fullmatch(path.name) and path.suffix.lower() in _CARD_SUFFIXES:
        return ABOUT_DATA
    if _is_data_card(candidate) or path.name.lower() in _METADATA_NAMES:
        return ABOUT_DATA
    # The job may ask for the lines of a table as text.
    is_wanted_table = file_format == "text" and content.problem == TABLE
    if content.problem and not is_wanted_table:
        return content.problem
    if file_format == "text" and content.format in ("parquet", "arrow"):
        return BINARY
    if content.format == "json" and not candidate.has_field and file_format == "auto":
        return f"{WITHOUT_FIELD}; it has {candidate.fields}"
    return ""


def _remedy(left_out: Sequence[LeftOut]) -> str:
    """Return what to do where every file of a source was left out."""
    reasons = [each.reason for each in left_out]
    if any(reason.startswith(WITHOUT_FIELD) for reason in reasons):
        return (
            "name its field of text in data.text_field, or set data.kind for chats and prompts, and"
            " data.fields for other names"
        )
    if UNKNOWN in reasons:
        return "name a file itself, or set data.format: text to take files of any ending as text"
    if TABLE in reasons:
        return (
            "name a column of the tables in data.text_field or data.fields, or set data.format:"
            " text to train on their lines as they are"
        )
    return "name text, JSON lines, Parquet or Arrow files"


def _is_data_card(candidate: Candidate) -> bool:
    """Return True if a Markdown file begins with the metadata of a hub dataset."""
    is_markdown = candidate.label.lower().endswith(".md")
    has_front_matter = candidate.raw.startswith(b"---")
    if not is_markdown or not has_front_matter:
        return False
    front = candidate.raw.split(b"\n---", 1)[0]
    return _CARD_KEYS.search(front) is not None


def _by_ending(
    usable: Sequence[Candidate], file_format: str
) -> tuple[list[Candidate], list[Candidate]]:
    """Split files into those with a suffix of data, and the others.

    If no file has such a suffix, the first group is the files with structured content. A single
    file is always in the first group.
    """
    if file_format == "text" or len(usable) == 1:
        return list(usable), []
    has_known_suffix = any(text_format_of(each.label) is not None for each in usable)
    known: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in usable:
        if has_known_suffix:
            is_csv = candidate.content.format == "csv"
            is_known = is_csv or text_format_of(candidate.label) is not None
        else:
            is_known = candidate.kind in STRUCTURED
        if is_known:
            known.append(candidate)
        else:
            others.append(candidate)
    return known, others


def _chosen_kind(usable: Sequence[Candidate]) -> str:
    holding = [each for each in usable if each.kind in STRUCTURED and each.has_field]
    sizes: dict[str, int] = defaultdict(int)
    for candidate in holding or usable:
        sizes[candidate.kind] += candidate.file.size_bytes
    return max(sizes, key=lambda kind: sizes[kind])


def describe_left_out(left_out: Sequence[LeftOut]) -> str:
    """List names by reason: `README.md, LICENSE (describes data); a.txt (text, not JSON)`."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for label, reason in left_out:
        by_reason[reason].append(label)
    groups = []
    for reason, labels in by_reason.items():
        shown = ", ".join(labels[:NAMES_SHOWN])
        more = len(labels) - NAMES_SHOWN
        if more > 0:
            shown = f"{shown} and {more} more"
        groups.append(f"{shown} ({reason})")
    return "; ".join(groups)
