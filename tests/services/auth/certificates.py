"""Certificates for tests, made by OpenSSL: an authority, what it signs, and an authority without trust."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from ringserve.cp_core.transport.peer_tls import PeerTls
from tests.programs import require
from tests.waiting import WAIT_SECONDS

DAYS = "2"
KEY_KIND = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Signed:
    """PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """Authority that signs certificates."""

    directory: Path
    own: Signed

    @classmethod
    def make(cls, directory: Path) -> Authority:
        directory.mkdir()
        own = Signed(directory / "ca.pem", directory / "ca.key")
        _openssl(
            *("req", "-x509", *KEY_KIND, "-keyout", str(own.key), "-out", str(own.cert)),
            *("-days", DAYS, "-subj", f"/CN={directory.name}", "-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 refuses an authority without it
        )
        return cls(directory, own)

    def sign(self, name: str, alternative_names: str = "DNS:localhost,IP:127.0.0.1") -> Signed:
        signed = Signed(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        _openssl(
            *("req", "-x509", *KEY_KIND, "-keyout", str(signed.key), "-out", str(signed.cert)),
            *("-days", DAYS, "-subj", f"/CN={name}", "-CA", str(self.own.cert), "-CAkey", str(self.own.key)),
            *("-addext", f"subjectAltName={alternative_names}", "-addext", "basicConstraints=critical,CA:FALSE"),
        )
        return signed

    def sign_expired(self, name: str) -> Signed:
        """Return a certificate that was valid until yesterday."""
        signed = Signed(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.cnf"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        _openssl("req", "-new", *KEY_KIND, "-keyout", str(signed.key), "-out", str(request), "-subj", f"/CN={name}")
        _openssl(
            *("x509", "-req", "-in", str(request), "-out", str(signed.cert), "-days", "-1"),
            *("-CA", str(self.own.cert), "-CAkey", str(self.own.key), "-extfile", str(extensions)),
        )
        return signed

    def peer(self, signed: Signed | None = None, *, server_name: str = "", trusts: Authority | None = None) -> PeerTls:
        """Return the TLS files of one of our processes: by default signed by this authority for loopback."""
        signed = signed or self.sign("peer")
        ca = (trusts or self).own.cert
        return PeerTls(cert=str(signed.cert), key=str(signed.key), ca=str(ca), server_name=server_name)


def _openssl(*arguments: str) -> None:
    done = subprocess.run(
        [require("openssl"), *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
