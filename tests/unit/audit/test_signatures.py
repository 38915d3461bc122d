"""Signatures of certificates: whatever signs them is verified by others, and by nobody else's key.

Method: the pre-authentication encoding is written here once more, from DSSE's text, and verified by
`cryptography` and by `openssl`.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.signatures import Signer, is_signed_by, keyid_of, open_public
from dora_pipe.audit.statement import PAYLOAD_TYPE, enveloped, pae, read_file
from dora_pipe.core.errors import UsageError

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

PAYLOAD = b'{"_type":"https://in-toto.io/Statement/v1","it is": "signed"}'
CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
SHA = {"P-256": hashes.SHA256(), "P-384": hashes.SHA384(), "P-521": hashes.SHA512()}
PASSWORD = b"open sesame"


def made(kind: str) -> Any:
    if kind == "Ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(CURVES[kind])


def saved(place: Path, key: Any, password: bytes | None = None) -> Path:
    """The private key in a file, its public one beside it as `.pub`."""
    how: Any = serialization.NoEncryption()
    if password is not None:
        how = serialization.BestAvailableEncryption(password)
    pem = serialization.Encoding.PEM
    path = place / "key.pem"
    path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, how))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(pem, spki))
    return path


def signed_file(place: Path, key: Path, password: bytes | None = None) -> Path:
    found = Signer.open(key, password).sign(PAYLOAD)
    file = place / "signed.json"
    file.write_bytes(enveloped(PAYLOAD, found.keyid, found.signature))
    return file


def test_what_is_signed_is_dsses_own_example() -> None:
    example = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pae("http://example.com/HelloWorld", b"hello world") == example
    assert pae("é", b"") == b"DSSEv1 2 \xc3\xa9 0 ", "lengths are of bytes"


@pytest.mark.parametrize("kind", ["Ed25519", *CURVES])
def test_a_signature_is_verified_by_who_knows_dsse_alone(tmp_path: Path, kind: str) -> None:
    key = made(kind)
    envelope = json.loads(signed_file(tmp_path, saved(tmp_path, key)).read_text())
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    body = base64.b64decode(envelope["payload"])
    assert body == PAYLOAD
    kinds = envelope["payloadType"].encode()
    parts = [b"DSSEv1", str(len(kinds)).encode(), kinds, str(len(body)).encode(), body]
    (one,) = envelope["signatures"]
    signature = base64.b64decode(one["sig"])
    how = () if kind == "Ed25519" else (ec.ECDSA(SHA[kind]),)
    key.public_key().verify(signature, b" ".join(parts), *how)
    assert one["keyid"] == keyid_of(key.public_key())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("kind", ["Ed25519", "P-256"])
def test_openssl_says_the_same(tmp_path: Path, kind: str) -> None:
    found = read_file(signed_file(tmp_path, saved(tmp_path, made(kind))))
    (tmp_path / "pae").write_bytes(pae(PAYLOAD_TYPE, PAYLOAD))
    (tmp_path / "sig").write_bytes(found.signatures[0][1])
    words = {
        "Ed25519": "pkeyutl -verify -pubin -inkey key.pub -rawin -in pae -sigfile sig",
        "P-256": "dgst -sha256 -verify key.pub -signature sig pae",
    }[kind]
    done = subprocess.run(["openssl", *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Verified" in done.stdout


def test_another_key_another_payload_and_another_signature_do_not_fit(tmp_path: Path) -> None:
    key = saved(tmp_path, made("Ed25519"))
    file = signed_file(tmp_path, key)
    public = open_public(key.with_suffix(".pub"))
    assert is_signed_by(read_file(file), public)
    assert not is_signed_by(read_file(file), made("Ed25519").public_key())
    assert not is_signed_by(read_file(file), made("P-256").public_key())
    plain = json.loads(file.read_text())
    for name, value in (
        ("payload", base64.b64encode(PAYLOAD.replace(b"signed", b"forged")).decode()),
        ("payloadType", "application/json"),
        ("signatures", [{"sig": base64.b64encode(bytes(64)).decode()}]),
        ("signatures", []),
    ):
        file.write_text(json.dumps({**plain, name: value}))
        assert not is_signed_by(read_file(file), public), name


def test_one_of_several_signatures_is_enough_whatever_its_name(tmp_path: Path) -> None:
    key = saved(tmp_path, made("P-256"))
    plain = json.loads(signed_file(tmp_path, key).read_text())
    (own,) = plain["signatures"]
    url_safe = own["sig"].replace("+", "-").replace("/", "_").rstrip("=")
    other = {"keyid": own["keyid"], "sig": base64.b64encode(bytes(70)).decode()}
    plain["signatures"] = [other, {"keyid": "a hint", "sig": url_safe}]
    file = tmp_path / "several.json"
    file.write_text(json.dumps(plain))
    assert is_signed_by(read_file(file), open_public(key.with_suffix(".pub")))


def test_a_key_with_a_password_is_opened_by_it_alone(tmp_path: Path) -> None:
    key = saved(tmp_path, made("Ed25519"), PASSWORD)
    assert Signer.open(key, PASSWORD).sign(PAYLOAD).kind == "ed25519"
    for password, says in ((None, "is encrypted"), (b"wrong", "the password is wrong")):
        with pytest.raises(UsageError, match=says) as raised:
            Signer.open(key, password)
        assert "sesame" not in f"{raised.value.message} {raised.value.hint}"
        assert "wrong" not in f"{raised.value.message}".replace("password is wrong", "")
    with pytest.raises(UsageError, match="has no password"):
        Signer.open(saved(tmp_path, made("Ed25519")), PASSWORD)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no private key in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "is no private key"),
        (b"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n", "is no private key in PEM"),
        (b"\xff" * 100, "is no private key in PEM"),
    ],
)
def test_what_is_no_key_is_one_line_and_a_hint(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as raised:
        Signer.open(path, None)
    assert raised.value.hint is not None and "openssl" in raised.value.hint
    assert content[30:60].decode("latin-1") not in raised.value.message or not content[30:60]


def test_keys_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    key = saved(tmp_path, rsa.generate_private_key(public_exponent=65537, key_size=1024))
    with pytest.raises(UsageError, match="is RSA; Ed25519 and ECDSA sign"):
        Signer.open(key, None)
    key = saved(tmp_path, ec.generate_private_key(ec.SECP256K1()))
    with pytest.raises(UsageError, match="is ECDSA over secp256k1; Ed25519 and ECDSA sign"):
        open_public(key.with_suffix(".pub"))


def test_a_private_key_is_not_taken_to_verify(tmp_path: Path) -> None:
    key = saved(tmp_path, made("Ed25519"))
    with pytest.raises(UsageError, match="is a private key: nobody needs it to verify"):
        open_public(key)
    with pytest.raises(UsageError, match="No such file"):
        open_public(tmp_path / "none")
