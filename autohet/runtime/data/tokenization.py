"""Tokenizers: bytes, or a tokenizer of the `tokenizers` library or of transformers."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autohet.runtime.data.marks import MAX_TOKEN
from planner.errors import ConfigError

BYTES_VOCAB_SIZE = 256
BYTES_END_TOKEN = 0
BYTES_IDENTITY = "bytes-1"
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


Tokens = NDArray[np.uint8] | NDArray[np.int64]


class Tokenizer(Protocol):
    """Converter from text to token ids; `identity` changes whenever the ids could change."""

    identity: str
    vocab_size: int
    end_token: int
    begin_tokens: tuple[int, ...]
    """Token ids that the tokenizer itself puts before a text; `encode` does not."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text, shape [any], without adding special tokens."""

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Return the ids of each text, and a mask of those that hold a character of its spans."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name; None if there is no such token."""

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of ids, with special tokens."""


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: token b is byte b, 0 to 255.

    Token 0, which text does not contain, ends a document.
    """

    identity = BYTES_IDENTITY
    vocab_size = BYTES_VOCAB_SIZE
    end_token = BYTES_END_TOKEN
    begin_tokens: tuple[int, ...] = ()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(_bytes_of(text), np.uint8) for text in texts]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        found = []
        for text, ids, wanted in zip(texts, self.encode(texts), spans, strict=True):
            counts = np.zeros(len(ids), np.bool_)
            for begin, end in wanted:
                first = len(_bytes_of(text[:begin]))
                length = len(_bytes_of(text[begin:end]))
                counts[first : first + length] = True
            found.append((ids.astype(np.int64), counts))
        return found

    def token_id(self, token: str) -> int | None:
        return None

    def decode(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")


def _bytes_of(text: str) -> bytes:
    """Return text in UTF-8; JSON can hold half a surrogate pair, which UTF-8 cannot."""
    return text.encode("utf-8", "replace")


class LibraryTokenizer:
    """Wrapper of a `tokenizers.Tokenizer` with its own normaliser, pre-tokenizer and model.

    The library encodes many texts in parallel.
    """

    def __init__(self, tokenizer: Any, end_token: int, name: str) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        # Ids may have gaps, so that the largest exceeds their number.
        largest = max(tokenizer.get_vocab().values(), default=0)
        self.vocab_size = max(tokenizer.get_vocab_size(), largest + 1)
        self.end_token = end_token
        self.begin_tokens = _begin_tokens(tokenizer)
        digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        self.identity = f"{name}-{digest}-{end_token}"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            whole = [_bytes_of(text).decode() for text in texts]
            encodings = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        whole = [_bytes_of(text).decode() for text in texts]
        encodings = self._tokenizer.encode_batch(whole, add_special_tokens=False)
        found = []
        for encoding, wanted in zip(encodings, spans, strict=True):
            ids = np.asarray(encoding.ids, np.int64)
            found.append((ids, _in_spans(encoding, wanted)))
        return found

    def token_id(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def decode(self, ids: NDArray[np.int64]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


class NoTokenizer:
    """Stand-in for the unknown tokenizer of rows that hold token ids."""

    identity = "token-ids-1"
    vocab_size = MAX_TOKEN
    end_token = 0
    """Token id that is used as padding only."""
    begin_tokens: tuple[int, ...] = ()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        raise ConfigError("data.tokenizer is missing: rows of text need one")

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        raise ConfigError("data.tokenizer is missing: rows of text need one")

    def token_id(self, token: str) -> int | None:
        return None

    def decode(self, ids: NDArray[np.int64]) -> str:
        return " ".join(map(str, ids))


def _begin_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that the post-processor of a library tokenizer puts before a text."""
    added = tokenizer.encode("").ids
    words = [(token, word) for word, token in tokenizer.get_vocab().items() if token not in added]
    if not added or not words:
        return ()

    # A word of the vocabulary, since a tokenizer may refuse all others.
    encoding = tokenizer.encode(min(words)[1])
    is_added = encoding.special_tokens_mask
    if all(is_added):
        return ()
    return tuple(encoding.ids[: is_added.index(0)])


def _in_spans(encoding: Any, spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return a mask of the tokens in the characters of `spans`.

    As in transformers, but for a span whose first or last character belongs to no token, such as a
    space that the tokenizer drops: transformers then counts none of its tokens, and this all that
    it has.
    """
    counts = np.zeros(len(encoding.ids), np.bool_)
    for begin, end in spans:
        first = _first_token(encoding, range(begin, end))
        last = _first_token(encoding, range(end - 1, begin - 1, -1))
        if first is not None and last is not None:
            counts[first : last + 1] = True
    return counts


def _first_token(encoding: Any, places: Iterable[int]) -> int | None:
    """Return the token of the first character in `places` that the tokenizer keeps."""
    for place in places:
        token = encoding.char_to_token(place)
        if token is not None:
            return int(token)
    return None


def load_tokenizer(
    name: str, end_of_document: str | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """Load the tokenizer of `data.tokenizer`.

    Raises:
        ConfigError: it is missing, cannot be loaded, or has no end token.
    """
    path = Path(name)
    if name in ("", "bytes") or _is_model_of_bytes(path):
        if end_of_document is not None:
            raise ConfigError(
                "data.end_of_document is not for the bytes tokenizer (token 0 ends a document);"
                " drop it"
            )
        return ByteTokenizer()
    if path.is_file():
        tokenizer, own_end = _from_file(path)
    else:
        tokenizer, own_end = _from_directory_or_hub(name, trust_remote_code)
    end = _end_token(tokenizer, end_of_document or own_end, name)
    return LibraryTokenizer(tokenizer, end, path.name)


def split_revision(name: str) -> tuple[str, str]:
    """Return a tokenizer's directory or hub id, and its revision: that after an `@`, or `main`."""
    source, at, revision = name.rpartition("@")
    if not at or Path(name).exists():
        return name, "main"
    return source, revision


def _is_model_of_bytes(directory: Path) -> bool:
    """Return True for a model's directory without tokenizer files and with 256 token ids."""
    if any(directory.glob("*token*")) or any(directory.glob("vocab*")):
        return False
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("vocab_size") == BYTES_VOCAB_SIZE


def _from_file(path: Path) -> tuple[Any, str | None]:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises bare Exception for a malformed file.
        raise ConfigError(
            f"data.tokenizer: {path} is not a tokenizers JSON file: {error}"
        ) from error
    return tokenizer, _configured_end_token(path.with_name("tokenizer_config.json"))


def _configured_end_token(config: Path) -> str | None:
    """Return the eos_token of the tokenizer_config.json beside the file; None if there is none."""
    try:
        end = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError):
        return None
    return end.get("content") if isinstance(end, dict) else end


def _from_directory_or_hub(name: str, trust_remote_code: bool) -> tuple[Any, str | None]:
    from transformers import AutoTokenizer

    source, revision = split_revision(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"data.tokenizer: {name!r} brings code of its own, which does not run here; look at"
                " that code and set model.trust_remote_code: true, or save it as tokenizer.json"
            ) from None
        raise ConfigError(
            f"data.tokenizer: cannot load {name!r}: {error}. Give bytes, a tokenizers JSON file, a"
            " directory with a Hugging Face tokenizer, or a hub id that this machine can reach"
        ) from error
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        # The library makes an empty one of a model's config alone.
        raise ConfigError(
            f"data.tokenizer: {name!r} holds no tokenizer; name in data.tokenizer the one that its"
            " model was trained with"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"data.tokenizer: {name!r} has no fast tokenizer; save it as tokenizer.json and name"
            " that"
        )
    return backend, tokenizer.eos_token


def _end_token(tokenizer: Any, wanted: str | None, name: str) -> int:
    candidates = (wanted,) if wanted else END_TOKENS
    for candidate in candidates:
        token = tokenizer.token_to_id(candidate)
        if token is not None:
            return int(token)
    raise ConfigError(
        f"data.tokenizer {name!r} has none of the end tokens {', '.join(candidates)};"
        " name one that it has in data.end_of_document"
    )
