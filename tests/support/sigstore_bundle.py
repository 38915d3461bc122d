"""A sigstore of a test: a certificate authority, a log of certificates and one of signatures, whose
keys live as long as the test does; nothing is reached.

Sources: RFC 6962 (signed certificate timestamps, leaves), Rekor v1's entry `dsse` 0.0.1 and signed
entry timestamps, the notes of checkpoints, sigstore's bundle v0.3 and trusted root v0.1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from dora_pipe.audit.statement import PAYLOAD_TYPE
from dora_pipe.schemas.wire import canonical

AT: Final = datetime(2025, 1, 1, tzinfo=UTC)
"""When everything is signed."""

AT_S: Final = int(AT.timestamp())
LOG: Final = "log.example.com"
ISSUER_OID: Final = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
ECDSA: Final = ec.ECDSA(hashes.SHA256())
DER: Final = serialization.Encoding.DER
NAME: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of a test")])

Key = ec.EllipticCurvePrivateKey


class Sigstore:
    """Example: ``Sigstore().bundle(statement, "me@example.com", "https://issuer.example.com")``."""

    def __init__(self) -> None:
        self._ca, self._certificates, self._log = (_key() for _ in range(3))
        self._root = (
            _unsigned(self._ca, NAME, 1, days=1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._ca.public_key()), critical=False
            )
            .sign(self._ca, hashes.SHA256())
        )

    @property
    def trusted_root(self) -> str:
        """What a verifier is given of it, as JSON."""
        authority = {
            "subject": {"commonName": "an authority of a test", "organization": "tests"},
            "uri": "https://ca.example.com",
            "certChain": {"certificates": [{"rawBytes": _base64(self._root.public_bytes(DER))}]},
            "validFor": {"start": "2024-01-01T00:00:00Z"},
        }
        return json.dumps(
            {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [_log_of(self._log, f"https://{LOG}")],
                "ctlogs": [_log_of(self._certificates, "https://ct.example.com")],
                "certificateAuthorities": [authority],
            }
        )

    def bundle(self, payload: bytes, identity: str, issuer: str) -> str:
        """A statement that somebody has signed with a key of the moment, as JSON."""
        key = _key()
        certificate = self._certificate(key, identity, issuer)
        kind = PAYLOAD_TYPE.encode()
        encoded = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
        signature = _base64(key.sign(encoded, ECDSA))
        envelope = {
            "payload": _base64(payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": signature}],
        }
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        entry = {
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": _sha256(json.dumps(envelope).encode()),
                "payloadHash": _sha256(payload),
                "signatures": [{"signature": signature, "verifier": _base64(pem)}],
            },
        }
        return json.dumps(
            {
                "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
                "verificationMaterial": {
                    "certificate": {"rawBytes": _base64(certificate.public_bytes(DER))},
                    "tlogEntries": [self._logged(canonical(entry))],
                },
                "dsseEnvelope": envelope,
            }
        )

    def _certificate(self, key: Key, identity: str, issuer: str) -> x509.Certificate:
        """For minutes, with the timestamp of the log of certificates in it."""
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca.public_key())
        names = x509.SubjectAlternativeName([x509.RFC822Name(identity)])
        builder = (
            _unsigned(key, x509.Name([]), 2, days=0)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)
            .add_extension(names, critical=True)
            .add_extension(authority, critical=False)
            .add_extension(x509.UnrecognizedExtension(ISSUER_OID, issuer.encode()), False)
        )
        unstamped = builder.sign(self._ca, hashes.SHA256()).tbs_certificate_bytes
        at_ms = AT_S * 1000
        signed = struct.pack("!BBQH", 0, 0, at_ms, 1)
        signed += hashlib.sha256(_spki(self._ca)).digest()
        signed += len(unstamped).to_bytes(3, "big") + unstamped + b"\0\0"
        signature = self._certificates.sign(signed, ECDSA)
        stamp = b"\0" + hashlib.sha256(_spki(self._certificates)).digest()
        stamp += struct.pack("!QH", at_ms, 0)
        stamp += struct.pack("!BBH", 4, 3, len(signature)) + signature
        stamps = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        octets = b"\x04" + (b"\x81" if len(stamps) > 127 else b"") + bytes([len(stamps)]) + stamps
        stamped = x509.UnrecognizedExtension(
            ExtensionOID.PRECERT_SIGNED_CERTIFICATE_TIMESTAMPS, octets
        )
        return builder.add_extension(stamped, critical=False).sign(self._ca, hashes.SHA256())

    def _logged(self, body: bytes) -> dict[str, Any]:
        """The only entry of a log, with its promise and its proof."""
        log_id = hashlib.sha256(_spki(self._log)).digest()
        leaf = _base64(hashlib.sha256(b"\0" + body).digest())
        note = f"{LOG}\n1\n{leaf}\n"
        mark = _base64(log_id[:4] + self._log.sign(note.encode(), ECDSA))
        promised = canonical(
            {
                "body": _base64(body),
                "integratedTime": AT_S,
                "logID": log_id.hex(),
                "logIndex": 0,
            }
        )
        return {
            "logIndex": "0",
            "logId": {"keyId": _base64(log_id)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(AT_S),
            "canonicalizedBody": _base64(body),
            "inclusionPromise": {
                "signedEntryTimestamp": _base64(self._log.sign(promised, ECDSA)),
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": leaf,
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n— {LOG} {mark}\n"},
            },
        }


def _key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def _spki(key: Key) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(DER, form)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _sha256(data: bytes) -> dict[str, str]:
    return {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}


def _unsigned(key: Key, subject: x509.Name, serial: int, *, days: int) -> x509.CertificateBuilder:
    half = timedelta(days=days, minutes=5)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=NAME)
    builder = builder.public_key(key.public_key()).serial_number(serial)
    return builder.not_valid_before(AT - half).not_valid_after(AT + half)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _log_of(key: Key, url: str) -> dict[str, Any]:
    return {
        "baseUrl": url,
        "hashAlgorithm": "SHA2_256",
        "logId": {"keyId": _base64(hashlib.sha256(_spki(key)).digest())},
        "publicKey": {
            "rawBytes": _base64(_spki(key)),
            "keyDetails": "PKIX_ECDSA_P256_SHA_256",
            "validFor": {"start": "2024-01-01T00:00:00Z"},
        },
    }
