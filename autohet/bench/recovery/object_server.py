"""S3 protocol server over a directory, as fast as one in Python is.

GET sends files of host memory by `sendfile`. It supports what a restore and boto3's downloads need:
GET (ranges), HEAD, PUT (If-None-Match), DELETE, DeleteObjects, ListObjectsV2. It has no multipart
uploads and no signatures: checkpoints are put into the directory directly. One bucket, whose name
is not checked.
"""

import io
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Mapping
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape


class ObjectServer(ThreadingHTTPServer):
    """Listens on (`host`, a free port) and answers in threads of its own until `close`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, directory: Path | str, host: str) -> None:
        super().__init__((host, 0), partial(_Handler, root=Path(directory)))
        self._claims = threading.Lock()
        self._thread = threading.Thread(
            target=self.serve_forever, name="object server", daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def put(self, path: Path, body: bytes, exclusive: bool) -> bool:
        """Put an object; return False if `exclusive` and the name is taken."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._claims:
            if exclusive and path.exists():
                return False
            temporary = path.with_name(f".{path.name}.{threading.get_ident()}.tmp")
            temporary.write_bytes(body)
            os.replace(temporary, path)
        return True

    def close(self) -> None:
        self.shutdown()
        self._thread.join(5.0)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def __init__(self, *arguments: object, root: Path) -> None:
        self._root = root
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path, query = self._target()
        if "list-type" in query:
            self._list(query)
        elif not path.is_file():
            self._refuse(404, "NoSuchKey")
        else:
            size = path.stat().st_size
            start, end = self._range(size)
            head = {
                "Content-Range": f"bytes {start}-{end}/{size}",
                "Accept-Ranges": "bytes",
                "ETag": '"e"',
            }
            self._answer(
                206 if "Range" in self.headers else 200, end - start + 1, head | _modified(path)
            )
            with path.open("rb", buffering=0) as data:
                while start <= end:
                    start += os.sendfile(
                        self.connection.fileno(), data.fileno(), start, end - start + 1
                    )

    def do_HEAD(self) -> None:
        path, _ = self._target()
        if path.is_file():
            self._answer(
                200,
                path.stat().st_size,
                {"Accept-Ranges": "bytes", "ETag": '"e"'} | _modified(path),
            )
        else:
            self._answer(404, 0, {})

    def do_PUT(self) -> None:
        body = self._body()
        if self.server.put(self._target()[0], body, self.headers.get("If-None-Match") == "*"):
            self._answer(200, 0, {"ETag": '"e"'})
        else:
            self._refuse(412, "PreconditionFailed")

    def do_DELETE(self) -> None:
        self._target()[0].unlink(missing_ok=True)
        self._answer(204, 0, {})

    def do_POST(self) -> None:
        body = self._body()
        if "delete" not in self._target()[1]:
            self._refuse(501, "NotImplemented")
            return
        elements = ElementTree.fromstring(body).iter()
        keys = [element.text or "" for element in elements if element.tag.endswith("Key")]
        for key in keys:
            (self._root / key).unlink(missing_ok=True)
        self._send_xml(200, "<DeleteResult/>")

    def _target(self) -> tuple[Path, Mapping[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        key = urllib.parse.unquote(parts.path).lstrip("/").partition("/")[2]
        path = (self._root / key).resolve()
        if not path.is_relative_to(self._root.resolve()):
            path = self._root / "outside"
        return path, dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))

    def _range(self, size: int) -> tuple[int, int]:
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        return (int(found[1]), min(int(found[2] or size - 1), size - 1)) if found else (0, size - 1)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        else:
            body = _read_chunks(self.rfile)
        coding = self.headers.get("Content-Encoding", "") + self.headers.get(
            "x-amz-content-sha256", ""
        )
        is_chunked_by_aws = "aws-chunked" in coding or "STREAMING" in coding
        return _read_chunks(io.BytesIO(body)) if is_chunked_by_aws else body

    def _list(self, query: Mapping[str, str]) -> None:
        prefix = query.get("prefix", "")
        names = sorted(
            str(path.relative_to(self._root)) for path in self._root.rglob("*") if path.is_file()
        )
        entries = []
        for name in names:
            if name.startswith(prefix) and not Path(name).name.startswith("."):
                status = (self._root / name).stat()
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
                entries.append(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified><Size>{status.st_size}</Size></Contents>"
                )
        body = "".join(entries)
        self._send_xml(
            200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{body}</ListBucketResult>"
        )

    def _refuse(self, status: int, code: str) -> None:
        self._send_xml(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _send_xml(self, status: int, text: str) -> None:
        body = text.encode()
        self._answer(status, len(body), {"Content-Type": "application/xml"})
        self.wfile.write(body)

    def _answer(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """No-op: printing costs more than serving."""


def _modified(path: Path) -> dict[str, str]:
    return {"Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}


def _read_chunks(stream: io.BufferedIOBase) -> bytes:
    """Return the payload of a body in chunks, of HTTP itself or `aws-chunked` inside of it.

    The body is hexadecimal length, extensions, bytes, again and again, with trailers after the
    last.
    """
    pieces = []
    while size := int(stream.readline().split(b";")[0], 16):
        pieces.append(stream.read(size))
        stream.readline()
    while stream.readline().strip():
        pass
    return b"".join(pieces)
