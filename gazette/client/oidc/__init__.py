"""Sign-in by OpenID Connect: ask a provider for tokens, and verify its tokens.

`OidcAuth` verifies tokens in brokers and members. `TokenFile` signs the calls of a client that has a token.
"""
