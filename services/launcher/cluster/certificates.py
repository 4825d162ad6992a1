"""A cluster's CA and the certificates that it signs for NATS. The only module that imports `cryptography`."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
SERVER_DAYS = 730
CLOCK_SKEW = timedelta(hours=1)
"""Certificates are valid from this long before their creation, because clocks of machines differ."""


class NoCertificate(Exception):
    """A file has no usable certificate or key; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    """Contents of a certificate."""

    names: tuple[str, ...]
    """Host names and addresses in the certificate; none for a CA."""
    begins_at: datetime
    ends_at: datetime
    allowed: tuple[str, ...] = ()
    """Names and addresses for which a CA may sign; none: all."""


def new_authority(hosts: Sequence[str], now: datetime, key_pem: bytes = b"") -> KeyPair:
    """A CA for servers of these names only: clients refuse its certificates for others (RFC 5280, name constraints).
    With the key of an earlier CA, what that has signed stays valid.

    Raises ValueError for a name that no certificate can have, NoCertificate for a key that is none.
    """
    key = _private_key(key_pem) if key_pem else ec.generate_private_key(ec.SECP256R1())
    name = _name("Baton cluster CA")
    made = (
        _begun(name, name, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(_only_for(hosts), critical=True)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(certificate=_pem(made), key=_key_pem(key))


def new_server(authority: KeyPair, hosts: Sequence[str], now: datetime) -> KeyPair:
    """A server certificate for these names. Raises NoCertificate if the authority is not valid."""
    issuer, issuer_key = _certificate(authority.certificate), _private_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        _begun(_name("Baton NATS"), issuer.subject, key, now, SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return KeyPair(certificate=_pem(made), key=_key_pem(key))


def facts_of(pem: bytes) -> CertificateFacts:
    """Contents of the first certificate in a PEM file. Raises NoCertificate."""
    certificate = _certificate(pem)
    names: list[str] = []
    allowed: list[str] = []
    for extension in certificate.extensions:
        match extension.value:
            case x509.SubjectAlternativeName() as given:
                names = [*given.get_values_for_type(x509.DNSName), *map(str, given.get_values_for_type(x509.IPAddress))]
            case x509.NameConstraints() as limits:
                allowed = [str(one.value).partition("/")[0] for one in limits.permitted_subtrees or ()]
    return CertificateFacts(
        names=tuple(names),
        begins_at=certificate.not_valid_before_utc,
        ends_at=certificate.not_valid_after_utc,
        allowed=tuple(allowed),
    )


def is_signed_by(server: bytes, authority: bytes) -> bool:
    """Whether the authority signed the server's certificate. Raises NoCertificate."""
    try:
        _certificate(server).verify_directly_issued_by(_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - CLOCK_SKEW)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _only_for(hosts: Sequence[str]) -> x509.NameConstraints:
    """An address is allowed as a network of one address. Both kinds must occur: a kind that is missing is free."""
    allowed = [_alternative(host) for host in hosts]
    subtrees: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_network(one.value)) if isinstance(one, x509.IPAddress) else one for one in allowed
    ]
    return x509.NameConstraints(permitted_subtrees=subtrees, excluded_subtrees=None)


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise NoCertificate("it contains no certificate") from error


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise NoCertificate("it contains no private key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise NoCertificate("its private key is of another type than `baton init` creates")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
