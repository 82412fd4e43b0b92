"""Mutual TLS between agents, for networks that are not trusted.

Both sides show a certificate that one authority has signed.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

DIRECTORY_VARIABLE = "AUTOHET_PEER_TLS"
"""Name of the environment variable with the TLS directory of every node; unset: no TLS.

The directory holds `certificate.pem`, `key.pem` and `authority.pem`.
"""


@dataclass(frozen=True)
class PeerTls:
    """TLS files in PEM.

    Every holder of a certificate of the authority is accepted. The host name in it is not checked,
    since agents are found by address.
    """

    certificate: Path
    key: Path
    authority: Path

    @staticmethod
    def from_environment() -> PeerTls | None:
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if not directory:
            return None
        names = ("certificate.pem", "key.pem", "authority.pem")
        return PeerTls(*(Path(directory, name) for name in names))

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Make the TLS context; raise OSError or ssl.SSLError if the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context
