"""gRPC over HTTP/2, as clients speak it, and what both ends of a connection have in common."""
