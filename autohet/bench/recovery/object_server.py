"""S3 protocol server over a directory, for what a restore asks: GET with ranges, HEAD, lists.

Objects are files of host memory, which aiohttp sends by `sendfile`. Nothing is signed or written:
checkpoints are put into the directory directly.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar
from xml.sax.saxutils import escape

from aiohttp import web

BUCKET = "bench-recovery"
T = TypeVar("T")


class ObjectServer:
    """Listens on (`host`, a free port) and answers in a thread of its own until `close`."""

    def __init__(self, directory: Path | str, host: str) -> None:
        self._root = Path(directory)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="object server", daemon=True
        )
        self._thread.start()

        application = web.Application()
        application.router.add_get(f"/{BUCKET}", self._list)
        application.router.add_static(f"/{BUCKET}", self._root)
        self._runner = web.AppRunner(application, access_log=None)
        self._run(self._runner.setup())
        self._run(web.TCPSite(self._runner, host, 0).start())
        self.endpoint = "http://{}:{}".format(*self._runner.addresses[0][:2])

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _list(self, request: web.Request) -> web.Response:
        prefix = request.query.get("prefix", "")
        entries = []
        for path in sorted(self._root.rglob("*")):
            name = str(path.relative_to(self._root))
            if name.startswith(prefix) and not path.name.startswith(".") and path.is_file():
                status = path.stat()
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
                entries.append(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
                    f"<Size>{status.st_size}</Size></Contents>"
                )
        text = f"<IsTruncated>false</IsTruncated>{''.join(entries)}"
        return web.Response(
            text=f"<ListBucketResult>{text}</ListBucketResult>", content_type="application/xml"
        )

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()
