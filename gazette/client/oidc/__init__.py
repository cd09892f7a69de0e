"""Sign-in by OpenID Connect: tokens of a provider are verified here, and asked for.

`OidcAuth` verifies tokens in brokers and members. `TokenFile` is the signer of a client that has a token.
"""
