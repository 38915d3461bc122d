"""Keys of certificates: Ed25519 or ECDSA in PEM, and sigstore's bundles where that is installed.

`cryptography` and `sigstore` are imported where they are used. No key, and no password, is ever
part of a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.audit.statement import PAYLOAD_TYPE, SignedStatement, pae
from dora_pipe.core.errors import UsageError, one_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey
    PublicKey = Ed25519PublicKey | EllipticCurvePublicKey

EXTRA: Final = "pip install 'dora-pipe[certificate]'"
MAKE: Final = "openssl genpkey -algorithm ed25519 -out key.pem"
PUBLIC: Final = "openssl pkey -in key.pem -pubout -out key.pub"
KEY_BYTES_MAX: Final = 64 * 1024
HASHES: Final = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""What a curve signs with, as DSSE's users agree on."""

_SAID: Final = 300
"""Characters of what sigstore says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A signature. Example: ``Signed(kind="ed25519", keyid="ab12...", signature=b"...")``."""

    kind: str
    keyid: str
    """sha256 (hex) of the public key's SubjectPublicKeyInfo in DER."""
    signature: bytes


class Signer:
    """A private key. Example: ``Signer.open(Path("key.pem"), None).sign(payload)``."""

    def __init__(self, key: PrivateKey) -> None:
        self._key = key

    @classmethod
    def open(cls, path: Path, password: bytes | None) -> Signer:
        """Raises UsageError, one line, for whatever cannot be used."""
        serialization = _serialization()
        data = _read(path)
        try:
            key = serialization.load_pem_private_key(data, password)
        except TypeError:  # As `cryptography` has it: a password too few, or one too many.
            if password is None:
                said, hint = "is encrypted", "its password goes into DORA_PIPE_KEY_PASSWORD"
            else:
                said, hint = "has no password", "leave DORA_PIPE_KEY_PASSWORD unset"
            raise UsageError(f"the key {path} {said}", hint=hint) from None
        except ValueError:
            what = "or the password is wrong" if password is not None else "in PEM"
            raise UsageError(f"{path} is no private key {what}", hint=f"{MAKE} makes one") from None
        except _unsupported():
            raise UsageError(
                f"the key {path} is of a kind that is not used here", hint=MAKE
            ) from None
        return cls(_known(path, key))

    def sign(self, payload: bytes) -> Signed:
        """Sign a statement as DSSE does."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        data, public = pae(PAYLOAD_TYPE, payload), self._key.public_key()
        if isinstance(self._key, Ed25519PrivateKey):
            signature = self._key.sign(data)
        else:
            signature = self._key.sign(data, _ecdsa(self._key.curve.name))
        return Signed(kind=kind_of(public), keyid=keyid_of(public), signature=signature)


def open_public(path: Path) -> PublicKey:
    """Raises UsageError, one line, for whatever cannot be used."""
    data = _read(path)
    if b"PRIVATE KEY" in data:
        raise UsageError(f"{path} is a private key: nobody needs it to verify", hint=PUBLIC)
    try:
        key = _serialization().load_pem_public_key(data)
    except (ValueError, _unsupported()):
        raise UsageError(f"{path} is no public key in PEM", hint=PUBLIC) from None
    found: PublicKey = _known(path, key)
    return found


def is_signed_by(found: SignedStatement, key: PublicKey) -> bool:
    """Whether one of the signatures is of this key."""
    data = pae(found.payload_type, found.payload)
    return any(_fits(key, signature, data) for _, signature in found.signatures)


def kind_of(key: PublicKey) -> str:
    """`ed25519`, or the curve of ECDSA."""
    curve = getattr(key, "curve", None)
    return "ed25519" if curve is None else f"ecdsa {curve.name}"


def keyid_of(key: PublicKey) -> str:
    """sha256 (hex) of its SubjectPublicKeyInfo in DER."""
    serialization = _serialization()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def verify_bundle(
    found: SignedStatement, identity: str, issuer: str, trusted_root: Path | None
) -> None:
    """Hold a sigstore bundle against who should have signed it, with nothing fetched: by this
    trusted root, or by the one that the package brings along.

    Raises UsageError where that cannot be done here, BadSignature where it does not hold.
    """
    try:
        from sigstore.errors import Error, VerificationError
        from sigstore.models import Bundle, TrustedRoot
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity
    except ImportError:
        raise UsageError(
            "it is a sigstore bundle, and the package sigstore is not installed",
            hint="pip install sigstore; or --key PUB where a key has signed it",
        ) from None
    if not identity or not issuer:
        raise UsageError(
            "a sigstore bundle says who signed it: who should have?",
            hint="--identity NAME --issuer URL",
        )
    try:
        if trusted_root is None:
            verifier = Verifier.production(offline=True)
        else:
            verifier = Verifier(trusted_root=TrustedRoot.from_file(str(trusted_root)))
    except (Error, ValueError, OSError) as error:
        where = trusted_root or "the one that sigstore brings along"
        raise UsageError(f"no trusted root: {where}: {_first_line(error)}") from None
    try:
        bundle = Bundle.from_json(found.bundle)
        kind, payload = verifier.verify_dsse(bundle, Identity(identity=identity, issuer=issuer))
    except (VerificationError, Error, ValueError) as error:
        raise BadSignature(_first_line(error)) from None
    if (kind, payload) != (found.payload_type, found.payload):
        raise BadSignature("what it signs is not what it holds")


class BadSignature(Exception):
    """Why a signature does not hold, in words."""


def key_ids(found: SignedStatement) -> Sequence[str]:
    """Which keys say that they have signed it."""
    return [keyid or "a key without a name" for keyid, _ in found.signatures]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(KEY_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"the key {path}: {error.strerror or error}", hint=MAKE) from None


def _serialization() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise UsageError(
            "signatures need the package cryptography, which is not installed", hint=EXTRA
        ) from None
    return serialization


def _unsupported() -> type[Exception]:
    from cryptography.exceptions import UnsupportedAlgorithm

    return UnsupportedAlgorithm


def _known(path: Path, key: Any) -> Any:
    """Ed25519, or ECDSA over one of three curves; others are refused by name."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    curve = getattr(key, "curve", None)
    known = isinstance(key, Ed25519PrivateKey | Ed25519PublicKey)
    if known or (curve is not None and curve.name in HASHES):
        return key
    said = type(key).__name__.removesuffix("PrivateKey").removesuffix("PublicKey")
    said = said.lstrip("_") if curve is None else f"ECDSA over {curve.name}"
    raise UsageError(f"the key {path} is {said}; Ed25519 and ECDSA sign certificates", hint=MAKE)


def _ecdsa(curve: str) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    return ECDSA(getattr(hashes, HASHES[curve])())


def _fits(key: PublicKey, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, data)
        else:
            key.verify(signature, data, _ecdsa(key.curve.name))
    except InvalidSignature:
        return False
    return True


def _first_line(error: Exception) -> str:
    return one_line(str(error).strip().partition("\n")[0] or type(error).__name__, _SAID)
