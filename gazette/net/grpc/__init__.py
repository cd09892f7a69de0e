"""Servers of gRPC over HTTP/2. In Python, gRPC costs most between the socket and the handler."""
