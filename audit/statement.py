"""The outer layers of a certificate: an in-toto Statement v1, and the DSSE envelope that signs it.

Sources: in-toto attestation framework v1.1 (spec/v1/statement.md, envelope.md, digest_set.md) and
DSSE v1.0 (protocol.md). What is signed are the bytes of the statement as they came, never a
rewriting of them. Pure: keys and files are others' business (`audit.signatures`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.certificate import PREDICATE_TYPE, Predicate
from dora_pipe.core.errors import SchemaError, UsageError
from dora_pipe.schemas.wire import decode

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"

BUNDLE_TYPE: Final = "application/vnd.dev.sigstore.bundle"
"""Begins the media type of a sigstore bundle, of any version."""

WEIGHTS: Final = "doraPipeWeights"
"""Algorithm of the digest of weights: lowercase hex of `schemas.policy.weights_digest`."""

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A certificate that is larger is none: one of 10 000 versions has 2 MB."""

PIECE: Final = 1 << 20
"""Bytes of a file that are hashed at a time."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A file, or the weights. Example: ``Subject(name="config.json", digest={"sha256": "ab"})``."""

    name: str
    digest: dict[str, str]


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What is signed; fields that it does not know are ignored, as in-toto has it."""

    type: str = msgspec.field(name="_type", default=STATEMENT_TYPE)
    subject: tuple[Subject, ...]
    predicate_type: str = msgspec.field(name="predicateType", default=PREDICATE_TYPE)
    predicate: Predicate


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Of an envelope, in base64; `keyid` says which key may fit and proves nothing."""

    sig: str
    keyid: str = ""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """DSSE v1.0. The payload is base64 of the statement's bytes."""

    payload_type: str = msgspec.field(name="payloadType")
    payload: str
    signatures: tuple[Signature, ...]


class SignedStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was read: the statement's bytes, and who signed them, if anybody did."""

    payload: bytes
    payload_type: str = PAYLOAD_TYPE
    signatures: tuple[tuple[str, bytes], ...] = ()
    """(key id, signature)."""
    bundle: bytes = b""
    """Of a sigstore bundle, all of it."""

    @property
    def signed(self) -> bool:
        """Whether there is a signature, right or wrong."""
        return bool(self.signatures or self.bundle)


def pae(payload_type: str, payload: bytes) -> bytes:
    """What DSSE signs.

    Example: ``pae("a/b", b"hello") == b"DSSEv1 3 a/b 5 hello"``
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def statement_bytes(subjects: Sequence[Subject], predicate: Predicate) -> bytes:
    """The statement as JSON; equal values give equal bytes."""
    statement = Statement(subject=tuple(subjects), predicate=predicate)
    return msgspec.json.encode(statement, order="deterministic")


def enveloped(payload: bytes, keyid: str, signature: bytes) -> bytes:
    """The file of a signed statement."""
    one = Signature(sig=base64.b64encode(signature).decode(), keyid=keyid)
    envelope = Envelope(
        payload_type=PAYLOAD_TYPE,
        payload=base64.b64encode(payload).decode(),
        signatures=(one,),
    )
    return msgspec.json.encode(envelope) + b"\n"


def read_file(path: Path) -> SignedStatement:
    """A bare statement, an envelope, or a sigstore bundle with one. Raises UsageError."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{path} is larger than {FILE_BYTES_MAX} bytes: no certificate")
        data = path.read_bytes()
        plain = msgspec.json.decode(data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", hint=_HINT) from None
    if not isinstance(plain, dict):
        raise UsageError(f"{path} is not a JSON object", hint=_HINT)
    if "_type" in plain:
        return SignedStatement(payload=data)
    is_bundle = str(plain.get("mediaType", "")).startswith(BUNDLE_TYPE)
    found = _envelope(path, plain.get("dsseEnvelope") if is_bundle else plain)
    return msgspec.structs.replace(found, bundle=data) if is_bundle else found


_HINT: Final = "`dora-pipe certificate RUN@STEP` writes one"


def _envelope(path: Path, plain: Any) -> SignedStatement:
    try:
        found = msgspec.convert(plain, Envelope)
        return SignedStatement(
            payload=_bytes_of(found.payload),
            payload_type=found.payload_type,
            signatures=tuple((one.keyid, _bytes_of(one.sig)) for one in found.signatures),
        )
    except (msgspec.ValidationError, binascii.Error, ValueError) as error:
        raise UsageError(f"{path} has no DSSE envelope: {error}", hint=_HINT) from None


def _bytes_of(text: str) -> bytes:
    """Of base64, standard or URL-safe: DSSE takes either."""
    plain = text.replace("-", "+").replace("_", "/")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    type: str = msgspec.field(name="_type")
    predicate_type: str = msgspec.field(name="predicateType")


_KIND = msgspec.json.Decoder(_Kind)
_STATEMENT = msgspec.json.Decoder(Statement)


def read_statement(found: SignedStatement) -> Statement:
    """What was signed. Raises UsageError for the statement of something else, SchemaError for one
    that cannot be read."""
    if found.payload_type != PAYLOAD_TYPE:
        raise UsageError(f"it is not an in-toto statement, but {found.payload_type!r}", hint=_HINT)
    kind = decode(found.payload, _KIND)
    if kind.type != STATEMENT_TYPE or kind.predicate_type != PREDICATE_TYPE:
        raise UsageError(
            f"it is a statement of another kind: {kind.predicate_type} ({kind.type})",
            hint=f"a certificate has the predicate type {PREDICATE_TYPE}",
        )
    statement = decode(found.payload, _STATEMENT)
    names = [one.name for one in statement.subject]
    if len(names) != len(set(names)):
        raise SchemaError("two subjects have one name", path="$.subject")
    return statement


def subjects_of(directory: Path, name: str, weights: str) -> list[Subject]:
    """The files below a directory, and the weights under a name. Raises OSError."""
    files = [
        Subject(name=one, digest={"sha256": sha256_of_file(directory / one)})
        for one in files_below(directory)
    ]
    return [Subject(name=name, digest={WEIGHTS: weights}), *files]


def files_below(directory: Path) -> list[str]:
    """Names of files, by their path from there; not those that begin with a point."""
    there = (one for one in directory.rglob("*") if one.is_symlink() or not one.is_dir())
    found = (one.relative_to(directory) for one in there)
    return sorted(
        one.as_posix() for one in found if not any(part.startswith(".") for part in one.parts)
    )


def sha256_of_file(path: Path) -> str:
    """Hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def files_of(statement: Statement) -> Mapping[str, str]:
    """Subjects that are files: sha256 (hex) by name."""
    return {one.name: one.digest["sha256"] for one in statement.subject if "sha256" in one.digest}


def weights_of(statement: Statement) -> list[str]:
    """Weights digests among the subjects."""
    return [one.digest[WEIGHTS] for one in statement.subject if WEIGHTS in one.digest]
