"""The S3 SDK: a client, uploads, and the meaning of its errors. Imported when a store is first used."""

from __future__ import annotations

from typing import Any, Final

import boto3.s3.transfer
import botocore.config
import botocore.credentials
import botocore.exceptions
import botocore.loaders
import botocore.session

from gazette.blobs.s3.access import S3Access, S3Settings
from gazette.errors import GazetteError, Invalid, NotAllowed, NotFound, Unavailable

_LOADER: Final = botocore.loaders.create_loader()
"""The SDK's descriptions of services: read from its files once, and shared by all stores."""

_MISSING: Final = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound", "404"})
_TRANSIENT: Final = frozenset(
    {
        "BadDigest",
        "IncompleteBody",
        "InvalidDigest",
        "InvalidRange",
        "OperationAborted",
        "PreconditionFailed",
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
"""Codes of errors after which to repeat a request, although their HTTP status blames the request."""

_CREDENTIALS: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)

_HINTS: Final = {
    "AccessDenied": "Allow these credentials to list the bucket, and to get, put and delete its objects.",
    "403": "Allow these credentials to list the bucket, and to get, put and delete its objects.",
    "NoSuchBucket": "Create the bucket, or correct the URL of the store.",
    "PermanentRedirect": "Name the bucket's own region: ?Region=… or AWS_REGION.",
    "AuthorizationHeaderMalformed": "Name the bucket's own region: ?Region=… or AWS_REGION.",
    "RequestTimeTooSkewed": "Set the clock of this machine.",
    "InvalidObjectState": "Restore the archived object, or keep fragments out of archive classes.",
}
_CHECK_CREDENTIALS: Final = (
    "Check the AWS credentials of this process: environment, profile or role."
)


def connect(access: S3Access, settings: S3Settings) -> tuple[Any, Any]:
    """Return a client, which any number of threads may use, and the credentials that it signs with.

    This call may use the network to get credentials. Raise ``Invalid`` if there is no region,
    ``NotAllowed`` if there are no credentials.
    """
    session = botocore.session.Session(profile=access.profile or None)
    session.register_component("data_loader", _LOADER)
    try:
        credentials = session.get_credentials()
        region = access.region or session.get_config_variable("region")
    except botocore.exceptions.ProfileNotFound as error:
        raise NotAllowed(str(error), hint=_CHECK_CREDENTIALS) from error
    if credentials is None:
        raise NotAllowed(
            "no AWS credentials were found",
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ?Profile=…, or give the host a role.",
        )
    if not region and not access.endpoint:
        raise Invalid(
            "the bucket's region is not known",
            path="url",
            hint="Add ?Region=… to the store's URL, or set AWS_REGION.",
        )
    has_endpoint = bool(access.endpoint)
    config = botocore.config.Config(
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        retries={"total_max_attempts": settings.attempts, "mode": "standard"},
        max_pool_connections=settings.connections,
        tcp_keepalive=True,
        signature_version="s3v4",
        # For S3 itself, use host names that contain the bucket. Otherwise presigned URLs lead to the global
        # endpoint, which redirects requests for a young bucket. A redirected signature is not valid.
        s3={
            "addressing_style": "path" if has_endpoint else "virtual",
            "payload_signing_enabled": has_endpoint,
        },
        # S3 checks a CRC of each upload, which is sent in a trailer. Many other stores do not support
        # trailers. For them, sign the SHA-256 of the payload: every store must check that.
        request_checksum_calculation="when_required" if has_endpoint else "when_supported",
        # Fragments have their own checksum.
        response_checksum_validation="when_required",
    )
    try:
        client = session.create_client(
            "s3",
            region_name=region or "us-east-1",
            endpoint_url=access.endpoint or None,
            config=config,
        )
        return client, credentials
    except ValueError as error:  # The SDK does not accept this endpoint or region.
        raise Invalid(f"S3: {error}", path="url") from error


def upload(
    client: Any,
    source: Any,
    bucket: str,
    key: str,
    arguments: dict[str, str],
    settings: S3Settings,
) -> None:
    """Store all bytes of a source, in this thread. Raise the errors of the SDK."""
    config = boto3.s3.transfer.TransferConfig(
        multipart_threshold=settings.part_bytes,
        multipart_chunksize=settings.part_bytes,
        use_threads=False,
        preferred_transfer_client="classic",
    )
    with boto3.s3.transfer.create_transfer_manager(client, config) as manager:
        manager.upload(source, bucket, key, extra_args=arguments).result()


def map_errors(error: Exception, **facts: Any) -> GazetteError:
    """Return the ``GazetteError`` for an error of the SDK.

    ``NotAllowed`` is for errors that every repetition would get: credentials, permissions, a missing bucket,
    a request that the store does not understand. ``NotFound`` is for a missing object, ``Invalid`` for
    arguments that the SDK refuses. All other errors are ``Unavailable``.
    """
    if isinstance(error, botocore.exceptions.ClientError):
        return _of_response(error, facts)
    if isinstance(
        error,
        botocore.exceptions.NoCredentialsError
        | botocore.exceptions.PartialCredentialsError
        | botocore.exceptions.CredentialRetrievalError
        | botocore.exceptions.TokenRetrievalError
        | botocore.exceptions.SSOError,
    ):
        return NotAllowed(f"S3: {error}", hint=_CHECK_CREDENTIALS, **facts)
    if isinstance(error, botocore.exceptions.ParamValidationError):
        return Invalid(f"S3: {error}", path="url", **facts)
    text = str(error) or repr(error)
    hint = "Check that the endpoint can be reached from here; the call is retried."
    return Unavailable(f"S3: {text}", hint=hint, **facts)


def are_at_hand(credentials: Any) -> bool:
    """Return True if signing uses no network: the credentials are static, or need no renewal yet."""
    if isinstance(credentials, botocore.credentials.RefreshableCredentials):
        return not credentials.refresh_needed()
    return type(credentials) is botocore.credentials.Credentials


def blames_credentials(error: Exception) -> bool:
    """Return True if the store does not know the credentials, or no longer knows them."""
    if not isinstance(error, botocore.exceptions.ClientError):
        return False
    return error.response.get("Error", {}).get("Code") in _CREDENTIALS


def is_already_exists(error: Exception) -> bool:
    """Return True if an object was not created because there is one already."""
    if not isinstance(error, botocore.exceptions.ClientError):
        return False
    return error.response.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _of_response(error: Any, facts: dict[str, Any]) -> GazetteError:
    response = error.response
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = response.get("Error", {}).get("Message") or "no message"
    message = f"S3 {error.operation_name}: {code}: {text}"
    facts = {**facts, "status": status}
    if code in _MISSING:
        return NotFound("no such object", **facts)
    if status >= 500 or status in (0, 408, 409, 425, 429) or code in _TRANSIENT:
        return Unavailable(message, hint=_HINTS.get(code), **facts)
    return NotAllowed(message, hint=_HINTS.get(code, _CHECK_CREDENTIALS), **facts)
