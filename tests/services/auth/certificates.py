"""Certificates for tests: an authority, the certificates it signs, and an authority that nobody trusts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ringserve.cp_core.transport.peer_tls import PeerTls

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
NAMES = {
    "DNS": x509.DNSName,
    "IP": lambda address: x509.IPAddress(ipaddress.ip_address(address)),
    "URI": x509.UniformResourceIdentifier,
}
"""Alternative names by their kind, as OpenSSL writes them: DNS:localhost,IP:127.0.0.1."""


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
        authority = cls(directory, Signed(directory / "ca.pem", directory / "ca.key"))
        authority._write(authority.own, directory.name, "", ends=datetime.now(UTC) + DAY)
        return authority

    def sign(self, name: str, alternative_names: str = "DNS:localhost,IP:127.0.0.1") -> Signed:
        signed = Signed(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        self._write(signed, name, alternative_names, ends=datetime.now(UTC) + DAY)
        return signed

    def sign_expired(self, name: str) -> Signed:
        """Return a certificate that was valid until an hour ago."""
        signed = Signed(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        self._write(signed, name, "DNS:localhost,IP:127.0.0.1", ends=datetime.now(UTC) - HOUR)
        return signed

    def peer(self, signed: Signed | None = None, *, server_name: str = "", trusts: Authority | None = None) -> PeerTls:
        """Return the TLS files of one of our processes: by default signed by this authority for loopback."""
        signed = signed or self.sign("peer")
        ca = (trusts or self).own.cert
        return PeerTls(cert=str(signed.cert), key=str(signed.key), ca=str(ca), server_name=server_name)

    def _write(self, files: Signed, name: str, alternative_names: str, *, ends: datetime) -> None:
        """Write a key and its certificate, with the extensions that Python 3.13 demands."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        is_authority = files == self.own
        issuer, signing_key = subject, key
        if not is_authority:
            issuer = x509.load_pem_x509_certificate(self.own.cert.read_bytes()).subject
            loaded = serialization.load_pem_private_key(self.own.key.read_bytes(), None)
            assert isinstance(loaded, ec.EllipticCurvePrivateKey)
            signing_key = loaded
        builder = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(ends - 2 * DAY)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        )
        if is_authority:
            others = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
            usage = dict.fromkeys([*others.split(), "encipher_only", "decipher_only"], False)
            builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        if alternative_names:
            given = (each.partition(":") for each in alternative_names.split(","))
            names = x509.SubjectAlternativeName([NAMES[kind](value) for kind, _, value in given])
            builder = builder.add_extension(names, critical=False)
        pem = serialization.Encoding.PEM
        files.cert.write_bytes(builder.sign(signing_key, hashes.SHA256()).public_bytes(pem))
        private, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        files.key.write_bytes(key.private_bytes(pem, private, plain))
