"""Conformance of our HTTP/2 and gRPC, by programs of others: h2spec and the interop client of grpc-go."""
