"""A proxy in front of an S3 endpoint that refuses what AWS documents to refuse, one rule at a time.

A rule sees a request and answers for the server, or lets it pass. Codes and sentences are those of
S3's "Error responses" page.
"""

import hashlib
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

from tests.harness.http_proxy import HttpAnswer, HttpProxy, Request

RESET = "reset"
"""Code of a refusal that is no answer: the connection ends."""


@dataclass(frozen=True)
class Refusal:
    """An error answer."""

    status: int
    code: str
    message: str
    details: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        parts = {"Code": self.code, "Message": self.message, **self.details}
        inside = "".join(f"<{name}>{text}</{name}>" for name, text in parts.items())
        return f"<?xml version='1.0'?><Error>{inside}</Error>".encode()


Rule = Callable[[Request], Refusal | None]


def signature_v2(request: Request) -> Refusal | None:
    """Refuse Signature V2, in headers and in URLs: buckets with KMS, new regions, R2, B2."""
    presigned = "AWSAccessKeyId" in request.query
    if presigned or request.authorization.startswith("AWS "):
        message = "The authorization mechanism you have provided is not supported."
        return Refusal(400, "InvalidRequest", f"{message} Please use AWS4-HMAC-SHA256.")
    return None


def presigned(request: Request) -> Refusal | None:
    """Refuse presigned URLs: `s3:authType` is REST-HEADER in many bucket policies."""
    if {"X-Amz-Signature", "Signature"} & request.query.keys():
        return Refusal(403, "AccessDenied", "Access Denied")
    return None


def region(name: str) -> Rule:
    """Refuse signatures for another region than the bucket's."""

    def rule(request: Request) -> Refusal | None:
        signed = request.credential[2] if request.credential else ""
        if signed == name:
            return None
        message = f"The authorization header is malformed; the region '{signed}' is wrong;"
        return Refusal(
            400,
            "AuthorizationHeaderMalformed",
            f"{message} expecting '{name}'",
            {"Region": name},
            {"x-amz-bucket-region": name},
        )

    return rule


def redirected(name: str) -> Rule:
    """Answer 301 whatever the signature: this endpoint is not the bucket's region's."""

    def rule(request: Request) -> Refusal | None:
        message = "The bucket you are attempting to access must be addressed using the specified"
        details = {"Endpoint": f"s3.{name}.amazonaws.com", "Bucket": "checkpoints"}
        headers = {"x-amz-bucket-region": name}
        return Refusal(301, "PermanentRedirect", f"{message} endpoint.", details, headers)

    return rule


def kms_denied(request: Request) -> Refusal | None:
    """Refuse puts: the role may not use the bucket's KMS key."""
    if request.method == "PUT" or "uploads" in request.query:
        user = "User: arn:aws:sts::123456789012:assumed-role/autohet-worker/i-1"
        message = f"{user} is not authorized to perform: kms:GenerateDataKey on the resource"
        return Refusal(403, "AccessDenied", f"{message} associated with this ciphertext")
    return None


def content_md5(request: Request) -> Refusal | None:
    """Refuse DeleteObjects without the right Content-MD5."""
    if request.method == "POST" and "delete" in request.query:
        digest = b64encode(hashlib.md5(request.body, usedforsecurity=False).digest()).decode()
        if request.headers.get("content-md5") != digest:
            message = "Missing required header for this request: Content-MD5"
            return Refusal(400, "InvalidRequest", message)
    return None


def no_conditions(request: Request) -> Refusal | None:
    """Answer 501 to conditional puts."""
    if request.method == "PUT" and "if-none-match" in request.headers:
        message = "A header you provided implies functionality that is not implemented"
        return Refusal(501, "NotImplemented", message, {"Header": "If-None-Match"})
    return None


def ignored_conditions(request: Request) -> Refusal | None:
    """Pass conditional puts on without their condition."""
    request.headers.pop("if-none-match", None)
    return None


@dataclass(frozen=True)
class ObjectList(Refusal):
    """A list of these objects, in this order."""

    names: tuple[str, ...] = ()

    @property
    def body(self) -> bytes:
        about = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size>"
        inside = "".join(f"<Contents><Key>{name}</Key>{about}</Contents>" for name in self.names)
        return (
            "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
            f"{inside}</ListBucketResult>"
        ).encode()


def unsorted_list(request: Request) -> Refusal | None:
    """List objects by no order of their names, as S3 documents of directory buckets."""
    if "list-type" not in request.query:
        return None
    prefix = request.query["prefix"][0]
    return ObjectList(200, "", "", names=(f"{prefix}b", f"{prefix}c", f"{prefix}a"))


def directory_bucket(request: Request) -> Refusal | None:
    """Refuse what directory buckets refuse: a list by a prefix that does not end in a slash."""
    is_list = request.method == "GET" and {"list-type", "uploads"} & request.query.keys()
    prefix = request.query.get("prefix", [""])[0]
    if is_list and prefix and not prefix.endswith("/"):
        message = "This bucket does not support a prefix that does not end in a delimiter."
        return Refusal(400, "InvalidArgument", message)
    return None


def no_checksums(request: Request) -> Refusal | None:
    """Refuse CRC headers, as Backblaze B2 did."""
    for name in request.headers:
        if name.startswith(("x-amz-checksum-crc", "x-amz-checksum-alg", "x-amz-sdk-checksum")):
            message = f"Unsupported header '{name}' received for this API call."
            return Refusal(400, "InvalidArgument", message)
    return None


def no_multi_delete(request: Request) -> Refusal | None:
    """Know no DeleteObjects."""
    if request.method == "POST" and "delete" in request.query:
        return Refusal(501, "NotImplemented", "Not implemented")
    return None


def ignored_range(request: Request) -> Refusal | None:
    """Answer a ranged GET with the whole object."""
    request.headers.pop("range", None)
    return None


def expired_keys(valid: Callable[[], str]) -> Rule:
    """Refuse every access key but the one that is valid now."""

    def rule(request: Request) -> Refusal | None:
        if request.credential and request.credential[0] == valid():
            return None
        return Refusal(400, "ExpiredToken", "The provided token has expired.")

    return rule


def skewed(request: Request) -> Refusal | None:
    """Refuse as if the client's clock were an hour behind."""
    message = "The difference between the request time and the current time is too large."
    date = formatdate(time.time() + 3600, usegmt=True)
    return Refusal(403, "RequestTimeTooSkewed", message, headers={"Date": date})


def virtual_hosts(domain: str) -> Rule:
    """Want the bucket in the host name, as Alibaba OSS does."""

    def rule(request: Request) -> Refusal | None:
        host = request.headers.get("host", "").partition(":")[0]
        bucket = host.removesuffix(f".{domain}")
        if bucket == host:
            message = "The bucket you are attempting to access must be addressed using OSS third"
            return Refusal(403, "SecondLevelDomainForbidden", f"{message} level domain.")
        request.path = f"/{bucket}{request.path}"
        return None

    return rule


class RefusingProxy(HttpProxy):
    """Passes on what none of its `rules` refuses. Counts requests and refusals."""

    def __init__(self, upstream: str, rules: tuple[Rule, ...], tls: ssl.SSLContext | None) -> None:
        self.rules = rules
        self.requests: list[Request] = []
        self.refused = 0
        super().__init__(upstream, tls)

    def answer(self, request: Request) -> HttpAnswer | None:
        self.requests.append(request)
        for rule in self.rules:
            refused = rule(request)
            if refused is not None:
                self.refused += 1
                is_reset = refused.code == RESET
                given = list(refused.headers.items())
                return None if is_reset else HttpAnswer(refused.status, given, refused.body)
        return self.forward(request)


@contextmanager
def refusing_proxy(
    upstream: str, *rules: Rule, tls: ssl.SSLContext | None = None
) -> Iterator[RefusingProxy]:
    proxy = RefusingProxy(upstream, rules, tls)
    try:
        yield proxy
    finally:
        proxy.close()


def private_authority(folder: Path, host: str) -> tuple[ssl.SSLContext, Path]:
    """Return a server's TLS context for `host`, and the file of the authority that signed it."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "authority.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = folder / "key.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, private)
    return context, pem
