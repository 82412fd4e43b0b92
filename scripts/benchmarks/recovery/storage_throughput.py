"""This repository's storage beside boto3 alone, AWS's CRT client and pyarrow's S3 filesystem: same
server, parts and concurrency.

    python -m scripts.benchmarks.recovery.storage_throughput [--mib 512] [--out FILE.json]

The server is a process of its own that speaks the part of S3's protocol that both need: GET sends a
file of host memory with sendfile, PUT swallows what comes, so that the clients are what is
measured. `latency` passes before each answer, as a distant bucket makes one wait (AWS states 100 to
200 ms to the first byte). Best of three; the client's CPU seconds are given too, since that is what
training loses. On few cores server and client share them: read the ratios, not the absolute
figures.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PART_BYTES = 16 << 20
REPEATS = 3


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    latency_s = 0.0
    path_of_data = ""

    def do_GET(self) -> None:
        size = os.path.getsize(self.path_of_data)
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(found[1]), int(found[2] or size - 1)) if found else (0, size - 1)
        self._head(
            206 if found else 200, end - start + 1, {"Content-Range": f"bytes {start}-{end}/{size}"}
        )
        with open(self.path_of_data, "rb") as data:
            while start <= end:
                start += os.sendfile(
                    self.connection.fileno(), data.fileno(), start, end - start + 1
                )

    def do_HEAD(self) -> None:
        self._head(200, os.path.getsize(self.path_of_data), {})

    def do_PUT(self) -> None:
        buffer = memoryview(bytearray(1 << 20))
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                self._swallow(size + 2, buffer)
            self.rfile.readline()
        else:
            self._swallow(int(self.headers.get("Content-Length", 0)), buffer)
        self._head(200, 0, {})

    def _swallow(self, left: int, buffer: memoryview) -> None:
        while left:
            left -= self.rfile.readinto(buffer[: min(left, len(buffer))])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        start = "?uploads" in self.path
        kind = "InitiateMultipartUploadResult" if start else "CompleteMultipartUploadResult"
        body = f"<{kind}><Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId><ETag>e</ETag></{kind}>".encode()  # noqa: E501
        self._head(200, len(body), {"Content-Type": "application/xml"})
        self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        time.sleep(self.latency_s)
        self.send_response(status)
        for name, value in {
            "Content-Length": str(length),
            "ETag": '"e"',
            "Accept-Ranges": "bytes",
            **headers,
        }.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Say nothing: printing costs more than serving."""


def _serve(pipe: Connection, path: str, latency_s: float) -> None:
    _Handler.path_of_data, _Handler.latency_s = path, latency_s
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    with suppress(EOFError):
        pipe.recv()  # nothing comes: it ends with whoever started it


def _our_runs(endpoint: str, num_bytes: int, concurrency: int) -> dict[str, Callable[[], None]]:
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    from recovery.storage.open import open_storage
    from recovery.storage.protocol import StorageOptions

    storage = open_storage(
        "s3://bucket", StorageOptions(concurrency=concurrency, part_bytes=PART_BYTES)
    )
    data = bytearray(num_bytes)

    def read() -> None:
        into = memoryview(data)

        def part(at: int) -> None:
            storage.get_into("object", at, into[at : at + PART_BYTES])

        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(part, range(0, num_bytes, PART_BYTES)))

    return {"read": read, "write": lambda: storage.put("object", data)}


def _plain_boto3_runs(
    endpoint: str, num_bytes: int, concurrency: int
) -> dict[str, Callable[[], None]]:
    """boto3 with its own data path: bodies through urllib3, CRC-32 of the standard library."""
    import boto3
    from botocore.config import Config

    style: Any = {"addressing_style": "path", "payload_signing_enabled": False}
    client = boto3.client(
        "s3", endpoint_url=endpoint, config=Config(max_pool_connections=2 * concurrency, s3=style)
    )
    data = bytearray(num_bytes)
    memory, place = memoryview(data), {"Bucket": "bucket", "Key": "object"}

    def get(at: int) -> None:
        end = min(at + PART_BYTES, num_bytes)
        body = client.get_object(**place, Range=f"bytes={at}-{end - 1}")["Body"]
        while at < end and (piece := body.read(min(1 << 20, end - at))):
            memory[at : at + len(piece)] = piece
            at += len(piece)

    def put(at: int) -> None:
        body = bytes(memory[at : at + PART_BYTES])
        client.upload_part(**place, UploadId="u", PartNumber=1 + at // PART_BYTES, Body=body)

    def in_parts(action: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(action, range(0, num_bytes, PART_BYTES)))

    return {"read": lambda: in_parts(get), "write": lambda: in_parts(put)}


def _crt_runs(endpoint: str, num_bytes: int, concurrency: int) -> dict[str, Callable[[], None]]:
    """AWS's CRT client, one request an object, as its own transfers are; a part's bytes come to
    Python in `on_body`.
    """
    from awscrt import auth, http, s3

    host = endpoint.removeprefix("http://")
    credentials = auth.AwsCredentialsProvider.new_static("testing", "testing")
    signing = s3.create_default_s3_signing_config(
        region="us-east-1", credential_provider=credentials
    )
    client = s3.S3Client(
        region="us-east-1",
        signing_config=signing,
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        part_size=PART_BYTES,
        throughput_target_gbps=10,
        max_active_connections_override=concurrency,
    )
    data = bytearray(num_bytes)
    memory = memoryview(data)

    def request(method: str, body: Any = None) -> Any:
        headers = [("host", host)] + ([] if body is None else [("content-length", str(num_bytes))])
        return http.HttpRequest(method, "/bucket/object", http.HttpHeaders(headers), body)

    def take(chunk: bytes, offset: int, **_: Any) -> None:
        memory[offset : offset + len(chunk)] = chunk

    def read() -> None:
        kind = s3.S3RequestType.GET_OBJECT
        client.make_request(type=kind, request=request("GET"), on_body=take).finished_future.result(
            120
        )

    def write() -> None:
        kind, sums = (
            s3.S3RequestType.PUT_OBJECT,
            s3.S3ChecksumConfig(
                algorithm=s3.S3ChecksumAlgorithm.CRC32C, location=s3.S3ChecksumLocation.TRAILER
            ),
        )
        sent = client.make_request(
            type=kind, request=request("PUT", io.BytesIO(data)), checksum_config=sums
        )
        sent.finished_future.result(120)

    return {"read": read, "write": write}


def _pyarrow_runs(endpoint: str, num_bytes: int, concurrency: int) -> dict[str, Callable[[], None]]:
    import pyarrow
    from pyarrow import fs

    pyarrow.set_io_thread_count(concurrency)
    s3 = fs.S3FileSystem(
        endpoint_override=endpoint.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
        access_key="testing",
        secret_key="testing",
    )
    data = bytearray(num_bytes)
    source = memoryview(data)

    def read() -> None:
        with s3.open_input_file("bucket/object") as file, ThreadPoolExecutor(concurrency) as pool:

            def part(at: int) -> None:
                source[at : at + PART_BYTES] = file.read_at(min(PART_BYTES, num_bytes - at), at)

            list(pool.map(part, range(0, num_bytes, PART_BYTES)))

    def write() -> None:
        with s3.open_output_stream("bucket/object", buffer_size=0) as stream:
            for at in range(0, num_bytes, PART_BYTES):
                stream.write(source[at : at + PART_BYTES])

    return {"read": read, "write": write}


def _measure(run: Callable[[], None], num_bytes: int) -> dict[str, float]:
    best = None
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        took = time.perf_counter() - wall, time.process_time() - cpu
        best = min(best or took, took)
    assert best is not None
    return {
        "bytes_per_s": round(num_bytes / best[0]),
        "cpu_s_per_gb": round(best[1] / num_bytes * 1e9, 3),
    }


def _compare(path: str, num_bytes: int, latency_s: float, concurrency: int) -> list[dict[str, Any]]:
    parent, child = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(child, path, latency_s), daemon=True
    )
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{parent.recv()}"
        runs = {
            "ours": _our_runs(endpoint, num_bytes, concurrency),
            "boto3": _plain_boto3_runs(endpoint, num_bytes, concurrency),
            "crt": _crt_runs(endpoint, num_bytes, concurrency),
            "pyarrow": _pyarrow_runs(endpoint, num_bytes, concurrency),
        }
        rows = []
        for direction in ("read", "write"):
            row: dict[str, Any] = {
                "direction": direction,
                "latency_s": latency_s,
                "concurrency": concurrency,
            }
            row.update({client: _measure(runs[client][direction], num_bytes) for client in runs})
            row["bytes_per_cpu_s_over_boto3"] = round(
                row["boto3"]["cpu_s_per_gb"] / row["ours"]["cpu_s_per_gb"], 2
            )
            rows.append(row)
            print(json.dumps(row), flush=True)
        return rows
    finally:
        server.terminate()
        server.join(10)


def _where() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10
    ).stdout
    cpus = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": commit.strip(),
        "python": platform.python_version(),
        "cpu": cpus[:1],
        "num_cpus": len(cpus),
        "load_before": os.getloadavg()[0],
    }


@contextmanager
def data_in_memory(num_bytes: int) -> Iterator[str]:
    """A path to a file of host memory that has no name of its own: it goes with this process,
    however that ends.
    """
    descriptor = os.memfd_create("storage_throughput")
    try:
        block = os.urandom(1 << 20)
        for at in range(0, num_bytes, len(block)):
            os.pwrite(descriptor, block[: num_bytes - at], at)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--out")
    args = parser.parse_args()
    os.environ.update(
        AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", AWS_DEFAULT_REGION="us-east-1"
    )
    num_bytes, where = args.mib << 20, _where()
    with data_in_memory(num_bytes) as path:
        cases = [(latency_s, concurrency) for latency_s in (0.0, 0.1) for concurrency in (1, 8)]
        rows = [row for case in cases for row in _compare(path, num_bytes, *case)]
    document = {
        "what": "S3 clients beside each other",
        "num_bytes": num_bytes,
        "part_bytes": PART_BYTES,
    }
    document |= {"where": where, "results": rows}
    if args.out:
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
