"""Files that accompany a model's weights: its tokenizer and its generation config.

The driver stores them once beside the checkpoints, and an export copies them.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file, list_repo_templates

from autohet.runtime.data.chat.targets import turn_ends
from autohet.runtime.data.chat.template import given_template
from autohet.runtime.data.examples import chat_template_of
from autohet.runtime.data.tokenization import (
    BYTES_END_TOKEN,
    BYTES_VOCAB_SIZE,
    Tokenizer,
    load_tokenizer,
    split_revision,
)
from autohet.runtime.job import Job
from autohet.runtime.messages import EVALUATIONS
from autohet.runtime.state.export_config import default_generation_config
from planner.errors import ConfigError
from planner.inputs.documents import Document
from recovery.checkpoint.manifest import Manifest
from recovery.storage.contents import holds
from recovery.storage.protocol import Storage

logger = logging.getLogger(__name__)

SCALAR = "model_files"
"""Name of a manifest's scalar: the prefix of the checkpoint's model files in the storage."""
PREFIX = "model-files/"
BYTES_END = "<|endoftext|>"
"""Spelling of token 0 in the files of the bytes tokenizer."""
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
FAST_CLASS = "PreTrainedTokenizerFast"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's other templates, such as `tool_use.jinja`."""
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    CHAT_TEMPLATE,
    "chat_template.json",
)


@dataclass(frozen=True)
class ModelFiles:
    """Model files, contents by name; plain data."""

    contents: Mapping[str, bytes]

    @property
    def prefix(self) -> str:
        """Prefix of these files in the storage, a function of their names and contents."""
        digest = hashlib.sha256()
        for name in sorted(self.contents):
            digest.update(f"{name}:{len(self.contents[name])}:".encode())
            digest.update(self.contents[name])
        return f"{PREFIX}{digest.hexdigest()[:16]}/"

    def store(self, storage: Storage) -> dict[str, str]:
        """Store what is missing or damaged; return the manifest's scalar that names the prefix.

        Raises:
            StorageError: the storage does not accept them.
        """
        for name, content in self.contents.items():
            if not holds(storage, self.prefix + name, content):
                storage.put(self.prefix + name, content)
        return {SCALAR: self.prefix}


def read_model_files(storage: Storage, prefix: str) -> dict[str, bytes]:
    """Return the files under a manifest's prefix, by name."""
    names = [info.name for info in storage.list(prefix)]
    return {name.removeprefix(prefix): bytes(storage.get(name)) for name in names}


def prefixes_beside(manifest: Manifest) -> tuple[str, ...]:
    """Return the prefixes of what belongs to a checkpoint: its model files, and losses."""
    prefix = manifest.scalars.get(SCALAR)
    if not prefix:
        return (EVALUATIONS,)
    return (str(prefix), EVALUATIONS)


def model_files(job: Job, document: Mapping[str, Any]) -> ModelFiles:
    """Return the model files of a job: the tokenizer of its data, and a generation config.

    The generation config is that of the pretrained model, or the library's default for a new model.
    Generation ends with what the model has learnt to end with, too.

    document: the model's config. Files that are not on this machine are left out and logged.
    """
    contents = _tokenizer_files(job)
    found = None
    if job.model.pretrained is not None:
        found = _content(job.model.pretrained, GENERATION_CONFIG, job.model.revision)
    ends = _trained_ends(job)
    if found is None:
        is_new = job.model.pretrained is None and bool(ends)
        config = {**document, "eos_token_id": None} if is_new else document
        found = _as_json(default_generation_config(config))
    return ModelFiles(contents | {GENERATION_CONFIG: _with_ends(found, ends)})


def _with_ends(content: bytes, ends: Collection[int]) -> bytes:
    """Return a generation config whose end tokens include `ends`; unchanged if they do."""
    config = _object_in(content)
    if not config:
        return content
    own = config.get("eos_token_id")
    known = own if isinstance(own, list) else [own]
    known = [each for each in known if each is not None]
    if set(ends) <= set(known):
        return content
    tokens = list(dict.fromkeys([*known, *ends]))
    # Else the library may take the end token of config.json instead.
    config.pop("_from_model_config", None)
    return _as_json({**config, "eos_token_id": tokens[0] if len(tokens) == 1 else tokens})


def _with_older_names(content: bytes) -> bytes:
    """Return a tokenizer's config as transformers 4.x and 5 read it; 5 alone reads its own form."""
    config = _object_in(content)
    older = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = FAST_CLASS
    if isinstance(config.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return content if older == config else _as_json(older)


def _object_in(content: bytes) -> Document:
    """Return the object of a JSON file; empty if the file is broken, which its readers say."""
    found = None
    with suppress(ValueError):
        found = json.loads(content)
    return found if isinstance(found, dict) else {}


def _trained_ends(job: Job) -> list[int]:
    """Return the tokens with which the job's documents end: those of turns, or of documents."""
    data = job.data
    if data is None:
        return []
    try:
        tokenizer = _tokenizer_of(job)
    except ConfigError as error:  # the nodes may have it
        logger.warning("The end token will not be in exports: %s", error)
        return []
    ends: list[int] = []
    if data.kind != "text":
        # Prompts and completions may be texts, which need no template.
        with suppress(ConfigError):
            tokens = turn_ends(chat_template_of(data))
            found = [tokenizer.token_id(token) for token in tokens]
            ends = [token for token in found if token is not None]
    if data.kind not in ("chat", "sharegpt") or not ends:
        ends.append(tokenizer.end_token)
    return ends


def _tokenizer_files(job: Job) -> dict[str, bytes]:
    if job.data is None:
        return {}
    name = job.data.tokenizer
    if name in ("", "bytes"):
        return _byte_tokenizer()
    contents = _of_file(Path(name), job) if Path(name).is_file() else _of_directory(name)
    if not contents:
        logger.warning("data.tokenizer %r is not on this machine: exports will have none", name)
    if TOKENIZER_CONFIG in contents:
        contents[TOKENIZER_CONFIG] = _with_older_names(contents[TOKENIZER_CONFIG])
    if contents and job.data.chat_template is not None:
        contents = {file: each for file, each in contents.items() if "/" not in file}
        contents[CHAT_TEMPLATE] = given_template(job.data.chat_template).encode()
    return contents


def _of_directory(name: str) -> dict[str, bytes]:
    """Return the tokenizer files of a directory or hub id."""
    source, revision = split_revision(name)
    contents = {}
    for file in (*TOKENIZER_FILES, *_more_templates(source, revision)):
        content = _content(source, file, revision)
        if content is not None:
            contents[file] = content
    return contents


def _more_templates(source: str, revision: str | None) -> list[str]:
    """Return the files of a tokenizer's other chat templates."""
    if Path(source).is_dir():
        names = [path.name for path in Path(source, MORE_TEMPLATES).glob("*.jinja")]
    else:
        try:
            names = list_repo_templates(source, local_files_only=False, revision=revision)
        except (OSError, ValueError):
            # There is no such id, or no network.
            names = []
    # The library names them with their suffix or without.
    return sorted(f"{MORE_TEMPLATES}/{name.removesuffix('.jinja')}.jinja" for name in names)


def _of_file(path: Path, job: Job) -> dict[str, bytes]:
    """Return a tokenizers JSON file, and the tokenizer files beside it."""
    contents = {}
    for file in TOKENIZER_FILES:
        beside = path.with_name(file)
        if file != TOKENIZER_FILE and beside.is_file():
            contents[file] = beside.read_bytes()
    for file in _more_templates(str(path.parent), None):
        contents[file] = (path.parent / file).read_bytes()

    # The file itself may have any name.
    contents[TOKENIZER_FILE] = path.read_bytes()
    if TOKENIZER_CONFIG not in contents:
        import tokenizers

        assert job.data is not None
        end = _tokenizer_of(job).end_token
        token = tokenizers.Tokenizer.from_file(job.data.tokenizer).id_to_token(end)
        contents[TOKENIZER_CONFIG] = _as_json({"tokenizer_class": FAST_CLASS, "eos_token": token})
    return contents


def _byte_tokenizer() -> dict[str, bytes]:
    """Return the `bytes` tokenizer as files of the tokenizers library.

    Token b is byte b, and token 0 ends a document.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(BYTES_VOCAB_SIZE)}
    # Text does not hold this byte.
    del vocabulary[letters[BYTES_END_TOKEN]]
    vocabulary[BYTES_END] = BYTES_END_TOKEN
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(BYTES_END, special=True, normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = {
        "tokenizer_class": FAST_CLASS,
        "eos_token": BYTES_END,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER_FILE: tokenizer.to_str().encode(), TOKENIZER_CONFIG: _as_json(config)}


def _content(source: str, file: str, revision: str | None) -> bytes | None:
    """Return a file of a directory or hub id; None if it is not there."""
    try:
        found = cached_file(
            source,
            file,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is None:
            return None
        return Path(found).read_bytes()
    except (OSError, ValueError):
        # There is no such directory or id, or no network.
        return None


def _as_json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _tokenizer_of(job: Job) -> Tokenizer:
    assert job.data is not None
    data = job.data
    return load_tokenizer(data.tokenizer, data.end_of_document, data.trust_remote_code)
